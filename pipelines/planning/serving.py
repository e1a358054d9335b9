"""How many bytes serving a model needs on one device, by formula; no torch here.

Weights as they lie in their files, keys and values of all sequences that are answered at once, and
what one step of the largest kind, a piece of a prompt, computes with. What the allocator and the
engine lose is not in it: see `HEADROOM` in `memory.py`.
"""

from dataclasses import dataclass
from typing import Literal

from pipelines.models.config import DecoderConfig
from pipelines.planning.memory_state import linear_shapes

BF16, FP32 = 2, 4
ServedWeights = Literal["bf16", "int8", "int4"]
_GROUP = 128  # weights that share a scale and a zero in int4, see `export/quantized.py`
PREFILL = 2048  # tokens of a prompt at once; engines cut longer ones


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on the device."""

    weights: int
    kv_cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations


def serving_memory(
    config: DecoderConfig, weight_bytes: int, sequences: int, tokens: int
) -> ServingMemory:
    """What answering needs.

    Args:
        config: The model's shape.
        weight_bytes: Of its tensors, however they are quantised.
        sequences: Answered at once.
        tokens: Of each, prompt and answer.
    """
    return ServingMemory(
        weights=weight_bytes,
        kv_cache=kv_cache_bytes(config, sequences, tokens),
        activations=_activations(config, sequences, min(PREFILL, tokens)),
    )


def served_weight_bytes(config: DecoderConfig, weights: ServedWeights) -> int:
    """Of a whole model as `export/quantized.py` writes it: quantised are the blocks' matrices.

    int8 has a scale for each row, int4 a scale and a zero for each group of a row.
    """
    whole = config.parameters * BF16
    shapes = linear_shapes(config).values()
    numbers = config.layers * sum(rows * columns for rows, columns in shapes)
    if weights == "int8":
        return whole - numbers * (BF16 - 1) + config.layers * sum(rows for rows, _ in shapes) * BF16
    if weights == "int4":
        return whole - numbers * BF16 + numbers // 2 + numbers // _GROUP * 2 * BF16
    return whole


def kv_cache_bytes(config: DecoderConfig, sequences: int, tokens: int) -> int:
    """Keys and values of every layer in bf16; a sliding window keeps no more than itself."""
    kept = min(tokens, config.sliding_window or tokens)
    return 2 * config.layers * config.kv_heads * config.head_width * BF16 * sequences * kept


def _activations(config: DecoderConfig, sequences: int, tokens: int) -> int:
    """Of the layer that holds most at once, and the logits of each sequence's last token."""
    feed_forward = (3 if config.gated else 2) * config.hidden
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_width
    layer = tokens * (2 * config.width + max(feed_forward, attention)) * BF16
    return layer + sequences * config.vocab_size * (BF16 + FP32)

"""How many bytes serving a model needs on one device, by formula; no torch here.

Weights as they lie in their files, keys and values of all sequences that are answered at once, and
what one step of the largest kind, a piece of a prompt, computes with. What the allocator and the
engine lose is not in it: see `HEADROOM` in `memory.py`.
"""

from dataclasses import dataclass

from pipelines.models.config import DecoderConfig

BF16, FP32 = 2, 4
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

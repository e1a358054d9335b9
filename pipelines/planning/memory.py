"""How many bytes training needs on one device, by formula; no torch here.

Weights, gradients and moments after ZeRO (Rajbhandari et al. 2020) for what is implemented: AdamW
with all three in fp32. Activations after Korthikanti et al. 2022, for attention that keeps no
scores. What the allocator loses is not in it: see `HEADROOM` in `layout_rule.py`.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from pipelines.distributed.layout import Layout
from pipelines.models.config import DecoderConfig

FP32 = 4
MOMENTS = 8  # two of AdamW a weight
NF4 = 0.52  # QLoRA's 4 bits, with the scales of blocks of 64 quantised once more
LOGITS_AT_ONCE = 1 << 27  # `models/loss.py` computes no more
Sharding = Literal["none", "optimizer", "gradients", "full"]


@dataclass(frozen=True)
class Training:
    """What else than the model decides the memory; sizes in tokens and samples."""

    layout: Layout
    sharding: Sharding
    micro_batch: int
    micro_batches: int  # of a step on one process
    sequence: int
    precision: str = "fp32"
    activation_checkpoint: str = "none"
    schedule: str = "1f1b"
    cpu_offload: bool = False
    adapter: str = "none"

    @property
    def compute_bytes(self) -> int:
        """Of a number in a matrix product."""
        return FP32 if self.precision in ("fp32", "tf32") else 2


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that has most of it: the first pipeline stage's."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it, at the end of a forward pass."""
        return self.weights + self.gradients + self.moments + self.activations + self.logits


def estimate(config: DecoderConfig, training: Training) -> Memory:
    """The bytes that a step needs on one device."""
    held = _stage_parameters(config, training.layout)
    weights, gradients, moments = _state(held, _largest_unit(config, training.layout), training)
    positions = training.micro_batch * training.sequence
    logits = min(positions * config.vocab_size, LOGITS_AT_ONCE) / training.layout.tp
    return Memory(
        weights=weights,
        gradients=gradients,
        moments=moments,
        activations=_activations(config, training),
        logits=logits * (2 * FP32 + training.compute_bytes),  # in fp32, their gradient, as computed
    )


def _state(held: float, unit: float, training: Training) -> tuple[float, float, float]:
    """Bytes of weights, gradients and moments for `held` numbers, gathered a `unit` at a time."""
    cast = 0 if training.compute_bytes == FP32 else training.compute_bytes
    shards = training.layout.dp_shard
    if training.adapter != "none":
        base = NF4 if training.adapter == "qlora" else training.compute_bytes
        return held * base / (shards if training.sharding == "full" else 1), 0.0, 0.0
    if training.sharding in ("none", "optimizer"):
        moments = MOMENTS / (shards if training.sharding == "optimizer" else 1)
        return held * (FP32 + cast), held * FP32, held * moments
    # FSDP2 keeps no whole weights between steps; stage 2 gathers all of them in the forward pass.
    whole = held if training.sharding == "gradients" else min(held, 2 * unit)
    if training.cpu_offload:
        return whole * training.compute_bytes, unit * FP32, 0.0
    gathered = whole * training.compute_bytes
    return held * FP32 / shards + gathered, held * FP32 / shards + unit * FP32, held * 8 / shards


def _stage_parameters(config: DecoderConfig, layout: Layout) -> float:
    """Numbers of the largest stage: embeddings, or head, with its layers."""
    layers = ceil(config.layers / layout.pp)
    rest: float = config.parameters - config.layers * config.layer_parameters
    if layout.pp > 1 and not config.tie_embeddings:
        rest /= 2  # embeddings and head lie on different stages; tied ones on both
    return (layers * config.layer_parameters + rest) / layout.tp


def _largest_unit(config: DecoderConfig, layout: Layout) -> float:
    """Numbers that FSDP2 gathers at once: a block, or embeddings and head."""
    return max(config.layer_parameters, config.vocab_size * config.width) / layout.tp


def _activations(config: DecoderConfig, training: Training) -> float:
    """Bytes saved for the backward pass."""
    layout = training.layout
    layers = ceil(config.layers / layout.pp)
    positions = training.micro_batch * training.sequence / layout.tp / layout.cp
    kept = {
        "none": _block(config, training.compute_bytes),
        "selective": _block_selective(config, training.compute_bytes),
        "full": config.width * FP32,
    }[training.activation_checkpoint]
    again = 0 if training.activation_checkpoint == "none" else _block(config, 2 * FP32)
    return positions * (layers * kept * _in_flight(training) + again)


def _in_flight(training: Training) -> int:
    """Micro-batches of which the first stage holds activations at once."""
    if training.layout.pp == 1:
        return 1
    if training.schedule == "gpipe":
        return training.micro_batches
    return min(training.layout.pp, training.micro_batches)


def _block(config: DecoderConfig, size: int) -> float:
    """Bytes a position that one block saves."""
    streams = 2 * config.width * FP32  # what the two norms read
    attention = 2 * (config.heads + config.kv_heads) * config.head_width  # q, k, v and the result
    feed_forward = (4 if config.gated else 2) * config.hidden
    return streams + size * (2 * config.width + attention + feed_forward)


def _block_selective(config: DecoderConfig, size: int) -> float:
    """Bytes a position where only matrix products and attention are saved."""
    attention = 2 * (config.heads + config.kv_heads) * config.head_width
    feed_forward = (2 if config.gated else 1) * config.hidden
    return config.width * FP32 + size * (2 * config.width + attention + feed_forward)

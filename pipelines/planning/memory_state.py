"""Bytes of weights, gradients and moments on one device; no torch here.

The formulas follow ZeRO (Rajbhandari et al. 2020) for the optimizers implemented here: AdamW with
weights, gradients and moments in fp32, the same with moments in 8 bits for the matrices of blocks,
or Muon with one moment for these.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import (
    BY_ROWS,
    adapted_matrices,
    is_of_experts,
    moments_block,
)
from pipelines.planning.memory_training import (
    FP32,
    SHARDINGS,
    Sharding,
    Training,
    gathered_bytes,
    layers_of,
)
from pipelines.recipe.training_section import Adapter

NF4 = 0.516  # bytes per weight: QLoRA's 4 bits, and the quantised scales of blocks of 64
MOMENTS = 8  # bytes per weight of AdamW's two moments
_GATHERED_TOGETHER = 1 << 26  # bytes, in `parallel/data_parallel.py`
_MUON_TOGETHER = 1 << 27  # numbers, in `training/optimizer.py`
_MUON_BYTES = 8  # per number while Muon orthogonalises it: four copies in bf16
_PAGES = 3 << 23  # numbers whose paged moments are here at once, in `training/paged_moments.py`
_DECODED_TOGETHER = 1 << 22  # numbers, in `training/optimizer.py`
_DECODED_BYTES = 28  # per number while its moments are decoded: seven copies in fp32


@dataclass(frozen=True)
class State:
    """Bytes of the training state on one process, and of the buffers that exchange it.

    Attributes:
        weights: Weights as stored and as kept gathered, including frozen ones.
        casts: Half-precision copies, which autocast keeps until the forward pass ends.
        casts_kept: The part of `casts` that still exists in the backward pass.
        gradients: Gradients when all of them exist.
        gradients_at_loss: Gradients when the last backward pass begins.
        optimizer: The optimizer's moments.
        buffers: Buffers in which processes exchange gradients and weights.
        passing: Weights gathered, and their buffers, only while a pass goes through the blocks.
    """

    weights: float
    casts: float
    casts_kept: float
    gradients: float
    gradients_at_loss: float
    optimizer: float
    buffers: float
    passing: float = 0.0


@dataclass(frozen=True)
class _Held:
    """Parameter counts of a process's part of the model, before data parallelism divides it.

    Attributes:
        whole: All parameters.
        root: Parameters outside the blocks: embeddings, last norm and head.
        block: Parameters of one block.
        layers: The number of blocks.
        looked_up: The root's parameters that no matrix product reads.
        away: Of a block's parameters, those of experts that a process never gathers.
    """

    whole: float
    root: float
    block: float
    layers: int
    looked_up: float = 0.0
    away: float = 0.0

    @property
    def gathered(self) -> float:
        """Parameters of a block that FSDP2 gathers."""
        return self.block - self.away

    @property
    def unit(self) -> float:
        """The largest number of parameters that FSDP2 gathers at once."""
        return max(self.root, self.gathered)

    @property
    def in_use(self) -> float:
        """Parameters gathered when FSDP2 frees blocks after use: the root and two blocks."""
        return min(self.whole, self.root + 2 * self.gathered)


def state_of(config: DecoderConfig, training: Training) -> State:
    """Return the state of one process."""
    held = _held(config, training)
    trained = held if training.trains_all else _adapters(config, training)
    frozen, frozen_passing = (0.0, 0.0) if training.trains_all else _frozen(config, held, training)
    sharded = training.is_fully_sharded
    paged = training.paged_moments and not training.on_cpu
    size = gathered_bytes(config, training)
    state = _sharded(trained, training, size) if sharded else _replicated(trained, training)
    moments = _moments(config, trained, training)
    moments *= kept_by_zero(training.sharding, training.layout.shards).optimizer
    here = 0.0 if paged or (sharded and training.cpu_offload) else moments
    weights, passing = frozen + state.weights, frozen_passing + state.passing
    return replace(state, weights=weights, passing=passing, optimizer=here)


class Kept(NamedTuple):
    """The fractions of weights, gradients and moments that each process keeps."""

    weights: float
    gradients: float
    optimizer: float


def kept_by_zero(sharding: Sharding, ways: int) -> Kept:
    """Return what ZeRO stages 0 to 3 keep on each process (Rajbhandari et al. 2020, figure 1)."""
    stage = SHARDINGS.index(sharding)
    return Kept(*(1 / ways if stage >= divides else 1.0 for divides in (3, 2, 1)))


def update_bytes(config: DecoderConfig, training: Training) -> float:
    """Return the further bytes that the optimizer needs while it updates the weights."""
    if training.paged_moments:
        return min(_update_numbers(config, training), _PAGES) * MOMENTS
    if training.optimizer == "adamw_8bit":
        return _decoded_bytes(config, training)
    return _muon_bytes(config, training)


def _update_numbers(config: DecoderConfig, training: Training) -> float:
    """Return how many trained numbers a process updates."""
    held = _held(config, training)
    trained = held if training.trains_all else _adapters(config, training)
    return trained.whole * kept_by_zero(training.sharding, training.layout.shards).optimizer


def _decoded_bytes(config: DecoderConfig, training: Training) -> float:
    """Return the bytes to decode the moments of a matrix, or of a part of it; compiled, none."""
    if training.compiled or training.cpu_offload:
        return 0.0
    numbers = [prod(matrix) for matrix in config.matrices.values()]
    if not training.trains_all:
        rank, adapted = training.adapter.rank, adapted_matrices(config, training.adapter)
        numbers = [rank * max(rows, columns) * many for rows, columns, many in adapted.values()]
    largest = max(numbers) / config.layers / training.layout.tp / training.shards
    return min(largest, _DECODED_TOGETHER) * _DECODED_BYTES


def _muon_bytes(config: DecoderConfig, training: Training) -> float:
    """Return the bytes Muon needs to orthogonalise matrices of one shape together, to a limit."""
    return max(map(prod, muon_batches(config, training)), default=0) * _MUON_BYTES


def muon_batches(config: DecoderConfig, training: Training) -> list[tuple[int, int]]:
    """Return how many matrices Muon orthogonalises together, and the numbers in each of them."""
    if training.optimizer != "muon" or not training.trains_all:
        return []
    matrices: Counter[tuple[int, ...]] = Counter()
    for *shape, number in config.matrices.values():
        matrices[tuple(sorted(shape))] += round(
            number / config.layers * layers_of(config, training)
        )
    batches = []
    for lying, number in matrices.items():
        together = max(1, _MUON_TOGETHER // prod(lying))
        sizes = [together] * (number // together) + [number % together]
        batches += [(size, prod(lying)) for size in sizes if size]
    return batches


def adapter_parameters(config: DecoderConfig, adapter: Adapter, *, of_experts: bool = False) -> int:
    """Return the number of trained parameters of a whole model with adapters, or of its experts."""
    return adapter.rank * sum(
        (rows + columns) * number
        for name, (rows, columns, number) in adapted_matrices(config, adapter).items()
        if is_of_experts(config, name) or not of_experts
    )


def _held(config: DecoderConfig, training: Training) -> _Held:
    """Return the parameters of a process: its layers, and embeddings or head."""
    block, layers, tp = config.layer_parameters, layers_of(config, training), training.layout.tp
    embeddings = table = config.vocab_size * config.width
    if config.positions == "learned":
        embeddings += config.context_length * config.width
    norm_and_head = config.parameters - config.layers * block - embeddings
    if config.tie_embeddings:
        norm_and_head += table
        if training.has_embeddings and training.has_head:
            embeddings -= table  # once; a pipeline's first and last process have them each
    looked_up = embeddings if training.has_embeddings else 0
    root = looked_up + (norm_and_head if training.has_head else 0)
    away = config.expert_parameters * (1 - 1 / training.ep)
    whole = (root + layers * block) / tp
    return _Held(whole, root / tp, block / tp, layers, looked_up / tp, away / tp)


def _replicated(held: _Held, training: Training) -> State:
    """Return the state of trained weights that every process holds undivided."""
    whole, exchanged = held.whole, training.layout.dp_cp > 1
    half = 0 if training.compute_bytes == FP32 else training.compute_bytes
    # Those to fp8 are made for a product, and again for the next one.
    of_block = 0 if training.precision == "fp8" else held.block * half
    of_root = (held.root - held.looked_up) * half
    casts = of_root + held.layers * of_block
    # With activation checkpointing, weights are cast again in the backward pass, block by block.
    kept = min(casts, of_root + of_block)
    buffers = 0.0
    if exchanged and training.accumulates:
        buffers += whole * FP32  # DistributedDataParallel's buckets for the gradients' sum
    if exchanged and training.sharding == "optimizer":
        buffers += min(whole * FP32, _GATHERED_TOGETHER) * (1 + 1 / training.shards)
    gradients = whole * FP32
    return State(
        weights=whole * FP32,
        casts=casts,
        casts_kept=kept if training.computes_again else casts,
        gradients=gradients,
        # Without accumulation, the gradients are DistributedDataParallel's buckets, if any.
        gradients_at_loss=gradients if training.accumulates or exchanged else 0.0,
        optimizer=0.0,
        buffers=buffers,
    )


def _sharded(held: _Held, training: Training, size: int) -> State:
    """Return the state of trained weights under FSDP2, which divides weights between steps.

    ZeRO stage 2 gathers all weights in the forward pass; stage 3 gathers one block at a time, with
    `size` bytes for each of its numbers.
    """
    whole = held.whole
    of_root, of_blocks = held.root * training.compute_bytes, held.layers * held.gathered * size
    gathered = of_root + (0 if training.gives_up_blocks else of_blocks)
    waiting = whole - held.layers * held.away
    undivided = (waiting if training.whole_gradients_wait else held.unit) * FP32
    # FSDP2 gathers a block into one buffer and copies it out, and its gradients in the same way;
    # meanwhile it gathers the next block.
    passing = (held.in_use - held.root if training.gives_up_blocks else 0.0) * size
    passing += 2 * held.gathered * size
    share = 0.0 if training.cpu_offload else whole / training.shards * FP32
    # Accumulated whole gradients turn into shards one by one.
    waits = training.whole_gradients_wait
    gradients = max(undivided, share) if waits else undivided + share
    of_earlier = gradients if waits else share
    return State(
        weights=share + gathered,
        casts=0.0,
        casts_kept=0.0,
        gradients=gradients,
        gradients_at_loss=of_earlier if training.accumulates else 0.0,
        optimizer=0.0,
        buffers=0.0,
        passing=passing,
    )


def _moments(config: DecoderConfig, held: _Held, training: Training) -> float:
    """Return the bytes of the moments of all trained weights, before sharding divides them."""
    if training.optimizer == "adamw":
        return held.whole * MOMENTS
    if not training.trains_all:  # adapters are matrices of blocks
        block = moments_block(training.adapter.rank)
        return held.whole * (_in_8_bits(block) if training.optimizer == "adamw_8bit" else MOMENTS)
    saved = 0.0  # for each number of a block
    for rows, columns, number in config.matrices.values():
        kept = MOMENTS / 2 if training.optimizer == "muon" else _in_8_bits(moments_block(columns))
        part = rows * columns * number / config.layers / config.layer_parameters
        saved += part * (MOMENTS - kept)
    return held.whole * MOMENTS - (held.whole - held.root) * saved


def _in_8_bits(block: int) -> float:
    """Return the bytes per weight of two moments: a code each, and a scale for each block."""
    return 2 * (1 + FP32 / block)


def _frozen(config: DecoderConfig, held: _Held, training: Training) -> tuple[float, float]:
    """Return the bytes of frozen weights, and those there only while a pass is in the blocks.

    NF4 stores only the matrices that have adapters. Where FSDP2 frees blocks after use, the last
    one, as observed, is there until the backward pass, and another one while blocks run.
    """
    saved = 0.0  # bytes per parameter of a block
    if training.adapter.kind == "qlora":
        adapted = adapted_matrices(config, training.adapter).values()
        quantised = sum(map(prod, adapted)) / config.layers
        saved = quantised / config.layer_parameters * (training.compute_bytes - NF4)
    whole = held.whole * training.compute_bytes - held.layers * held.block * saved
    if not training.is_fully_sharded:
        return whole, 0.0
    share = 0.0 if training.cpu_offload else whole / training.shards
    if not training.gives_up_blocks:
        return share + whole, 0.0
    block = held.gathered * training.compute_bytes - held.block * saved
    last, another = (block * (held.layers >= number) for number in (1, 2))
    return share + held.root * training.compute_bytes + last, another


def _adapters(config: DecoderConfig, training: Training) -> _Held:
    """Return the adapters' parameter counts; tensor parallelism divides one matrix of each two."""
    adapter, tp = training.adapter, training.layout.tp
    held = {
        name: (rows + columns / tp if name.endswith(BY_ROWS) else rows / tp + columns)
        * (adapter.rank * number / config.layers)
        for name, (rows, columns, number) in adapted_matrices(config, adapter).items()
    }
    layers, block = layers_of(config, training), sum(held.values())
    theirs = sum(held[name] for name in held if is_of_experts(config, name))
    return _Held(layers * block, 0, block, layers, away=theirs * (1 - 1 / training.ep))

"""Formulas for the bytes that training needs on one device; no torch here.

A step's memory is greatest at one of a few moments, and the parts are given for that moment. For
example, unless gradients accumulate, none exists yet while all activations do.
"""

from dataclasses import dataclass, replace

from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import linear_shapes
from pipelines.planning.memory_activations import (
    computed_again,
    in_flight,
    kept,
    logits,
    of_one_block,
    received,
    within_block,
)
from pipelines.planning.memory_state import state_of, update_bytes
from pipelines.planning.memory_training import FP32, Training

HEADROOM = 0.9  # the part of a device's memory that tensors may take; see `Memory.margin`
_BATCH = 8 + 8 + 4  # bytes per token: its id, the next token's id and its document's number
_BATCHES = 17  # one in use, and those that `loading/sources/readers.py` reads ahead


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs most, at the moment when it needs most.

    Attributes:
        weights: Weights as stored, as gathered and as cast for matrix products.
        gradients: Gradients of trained weights that exist at that moment.
        optimizer: AdamW's two moments, in fp32 or in 8 bits, or Muon's one.
        activations: Activations kept for the backward pass, and their gradients.
        logits: Logits and the loss's tensors that exist at that moment.
        buffers: Buffers for exchanges between processes, batches and tables of positions.
        moment: The name of that moment.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    moment: str = ""

    @property
    def used(self) -> float:
        """Bytes that tensors take."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers

    @property
    def margin(self) -> float:
        """Further bytes for the allocator's fragments, the libraries and NCCL."""
        return self.used * (1 / HEADROOM - 1)

    @property
    def total(self) -> float:
        """Bytes that the device must have."""
        return self.used + self.margin

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by purpose, in the order of a report's table; they add up to the total."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "buffers": self.buffers,
            "margin": self.margin,
        }


def estimate(config: DecoderConfig, training: Training) -> Memory:
    """Return the bytes that a step needs on the device that needs most."""
    ranks = (replace(training, rank=rank) for rank in range(training.layout.pp))
    moments = (moment for rank in ranks for moment in _moments(config, rank))
    return max(moments, key=lambda memory: memory.used)


def _moments(config: DecoderConfig, training: Training) -> list[Memory]:
    """Return the memory at each possible peak of a step; accumulated gradients exist at all."""
    state = state_of(config, training)
    buffers = state.buffers + _buffers(config, training)
    forward, backward = logits(config, training)
    is_whole = training.has_head and not training.is_fully_sharded
    # Of the head's weight, the first gradient to exist.
    root = _table_gradient(config, training) if is_whole else 0.0
    begun = max(state.gradients_at_loss, root)
    activations, again = kept(config, training), computed_again(config, training)
    within = within_block(config, training)
    # Autocast begins anew in each forward pass, so each micro-batch has its own copies of weights.
    copies = 1.0 if training.computes_again else in_flight(training)

    def at(moment: str, gradients: float, activations: float, logits: float = 0.0) -> Memory:
        casts = state.casts if moment == "end of the forward pass" else state.casts_kept
        return Memory(
            weights=state.weights + casts * copies,
            gradients=gradients,
            optimizer=state.optimizer,
            activations=activations,
            logits=logits,
            buffers=buffers + (state.passing if "block" in moment else 0.0),
            moment=moment,
        )

    last = of_one_block(config, training) + within
    ended = state.gradients + _further_gradient(config, training)
    return [
        at("end of the forward pass", state.gradients_at_loss, activations, forward),
        at("loss", state.gradients_at_loss, activations, backward),
        at("backward pass, last block", begun, activations + again + within),
        at("backward pass, first block", state.gradients, last),
        at("end of the backward pass", ended, 0.0),
        at("update", state.gradients, update_bytes(config, training)),
    ]


def _table_gradient(config: DecoderConfig, training: Training) -> float:
    """Return the bytes of the gradient of the head's weight, or of the embeddings' alike."""
    if not training.trains_all:
        return 0.0
    return config.vocab_size * config.width / training.layout.tp * FP32


def _further_gradient(config: DecoderConfig, training: Training) -> float:
    """Return the bytes of the embeddings' whole gradient before it is added to others.

    Tied embeddings' gradient is first added to the head's, which makes another tensor.
    """
    if training.is_fully_sharded or not training.has_embeddings:
        return 0.0
    copies = 2 * (config.tie_embeddings and training.has_head) + training.accumulates
    return _table_gradient(config, training) * copies


def _buffers(config: DecoderConfig, training: Training) -> float:
    """Return the bytes of batches read ahead, position tables, what a pipeline's stages receive
    into, one matrix decoded from NF4, and what tensor-parallel processes read of each other: two
    parts of a sum (`_pipelined_produce_and_all2all` of `torch.distributed._symmetric_memory`).
    """
    tokens = training.micro_batch * training.sequence
    kinds = 1 if config.local_rope_theta is None else 2
    tables = kinds * 2 * config.context_length * config.rotary_width * FP32
    largest = max(rows * columns for rows, columns in linear_shapes(config).values())
    decoded = largest * training.compute_bytes if training.adapter.kind == "qlora" else 0.0
    fixed = tokens * _BATCH * _BATCHES + tables + received(config, training)
    shared = 2 * training.positions * config.width * training.compute_bytes
    fixed += shared if training.async_tp else 0.0
    return fixed + decoded / training.layout.tp

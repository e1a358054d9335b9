"""Whether a shared storage gives a run what it reads and writes; no torch here.

A storage has one rate, and the nodes share it: 100 GB/s over 100 nodes is 1 GB/s each. What counts
is what a node needs while all the others need it too.
"""

from dataclasses import dataclass
from typing import Literal

from pipelines.models.config import DecoderConfig
from pipelines.planning.memory_state import MOMENTS, adapter_parameters
from pipelines.planning.memory_training import FP32, Training
from pipelines.planning.step_time import trainable

Need = Literal["loader", "checkpoint", "start"]
LEAST_STALL = 1.0  # seconds, an assumption: processes agree on a save, however little they copy
START_SECONDS = 600.0  # in which a run is expected to have read its state


@dataclass(frozen=True)
class Storage:
    """What a storage gives to all nodes together, in bytes a second.

    Attributes:
        read: By reading.
        write: By writing.
    """

    read: float
    write: float

    def per_node(self, nodes: int) -> "Storage":
        """What each of so many gets when all want it."""
        return Storage(self.read / nodes, self.write / nodes)


@dataclass(frozen=True)
class Demand:
    """What a node needs, and what it gets.

    Attributes:
        name: What it is needed for.
        wanted: Bytes a second.
        given: Bytes a second of one node's share; None where the storage is unknown.
        seconds: That it takes at the given rate: of a step's data, of a checkpoint, of a start.
    """

    name: Need
    wanted: float
    given: float | None
    seconds: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the storage gives enough; None where it is unknown."""
        return None if self.given is None else self.given >= self.wanted


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one checkpoint, by `torch.distributed.checkpoint`, all files together.

    Attributes:
        weights: Trained ones in fp32; frozen ones are the base model's and are not written.
        optimizer: AdamW's moments.
    """

    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.optimizer


def checkpoint_size(config: DecoderConfig, training: Training) -> CheckpointSize:
    """What a checkpoint of this run takes, whatever its layout."""
    trained = config.parameters
    if not training.trains_all:
        trained = adapter_parameters(config, training.adapter)
    return CheckpointSize(trained * FP32, trained * MOMENTS)


def stall_seconds(size: CheckpointSize, training: Training, host_bandwidth: float | None) -> float:
    """How long a checkpoint keeps training waiting: until each process's part is in host memory.

    The rest is written while training goes on. Replicas share the writing among them.
    """
    parts = training.shards * training.layout.tp * training.layout.pp
    copying = 0.0 if host_bandwidth is None else size.total / parts / host_bandwidth
    return max(LEAST_STALL, copying)


def demands(
    config: DecoderConfig,
    training: Training,
    *,
    nodes: int,
    step_seconds: float,
    checkpoint_seconds: float,
    storage: Storage | None,
) -> list[Demand]:
    """What each node needs of the storage for its data, its checkpoints and its start.

    Args:
        config: The model's shape.
        training: How it is laid out.
        nodes: That share the storage.
        step_seconds: Of an optimizer step.
        checkpoint_seconds: Between checkpoints.
        storage: What it gives to all; None where that isn't known.
    """
    layout = training.layout
    id_bytes = 2 if config.vocab_size <= 1 << 16 else 4  # as token shards hold them
    samples = training.micro_batch * training.micro_batches * layout.dp
    # Each process reads the samples of its own data-parallel group.
    data = samples * training.sequence * id_bytes * layout.world / layout.dp / nodes
    size = checkpoint_size(config, training).total / nodes
    # Every replica reads the weights it starts from, and where it goes on, moments too.
    frozen = (1 - trainable(config, training)) * config.parameters * training.compute_bytes
    start = (size * nodes + frozen) * max(1, layout.dp_replicate) / nodes
    share = storage.per_node(nodes) if storage is not None else None
    read, write = (share.read, share.write) if share is not None else (None, None)
    needs: list[tuple[Need, float, float, float | None]] = [
        ("loader", data, step_seconds, read),
        ("checkpoint", size, checkpoint_seconds, write),
        ("start", start, START_SECONDS, read),
    ]
    return [
        Demand(name, amount / seconds, given, None if given is None else amount / given)
        for name, amount, seconds, given in needs
    ]

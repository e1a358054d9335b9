"""Whether a shared storage gives a run what it reads and writes; no torch here.

A storage has one rate, and the nodes share it: 100 GB/s over 100 nodes is 1 GB/s each. What counts
is what a node needs while all the others need it too.

What failures of devices cost a long run, and how often to save it; no torch here.

Sources: Young 1974, "A First Order Approximation to the Optimum Checkpoint Interval"; Daly 2006, "A
Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", equations 20 and 37.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pipelines.models.config import DecoderConfig
from pipelines.planning.memory_state import MOMENTS, adapter_parameters
from pipelines.planning.memory_training import FP32, Training
from pipelines.planning.step_time import trainable

# Of one GPU, its host and its share of the network: Llama Team 2024, "The Llama 3 Herd of Models",
# section 3.3.4: 419 unexpected interruptions in 54 days of 16,384 H100.
DEVICE_MTBF_HOURS = 16_384 * 54 * 24 / 419
RESTART_SECONDS = 600.0  # from a failure to the next step: a new node, imports, reading back


@dataclass(frozen=True)
class Failures:
    """What a run has to expect.

    Attributes:
        mtbf_hours: Between failures of any of its devices.
        restarts: Expected in the whole run.
        interval_seconds: Between checkpoints, where least is lost.
        seconds: The run's expected length, with checkpoints, restarts and work done twice.
    """

    mtbf_hours: float
    restarts: float
    interval_seconds: float
    seconds: float


def failures(
    work_seconds: float,
    devices: int,
    stall_seconds: float,
    *,
    device_mtbf_hours: float = DEVICE_MTBF_HOURS,
    restart_seconds: float = RESTART_SECONDS,
) -> Failures:
    """What to expect of a run.

    Args:
        work_seconds: Of steps alone.
        devices: Any of which ends the run until it is started again.
        stall_seconds: In which a checkpoint keeps training waiting.
        device_mtbf_hours: Mean time between failures of one device.
        restart_seconds: From a failure until training goes on.
    """
    mtbf = device_mtbf_hours * 3600 / devices
    interval = daly_interval(stall_seconds, mtbf)
    seconds = expected_seconds(work_seconds, interval, stall_seconds, mtbf, restart_seconds)
    return Failures(mtbf / 3600, seconds / mtbf, interval, seconds)


def young_interval(stall: float, mtbf: float) -> float:
    """Seconds of work between checkpoints that take `stall` seconds, to the first order."""
    return math.sqrt(2 * stall * mtbf)


def daly_interval(stall: float, mtbf: float) -> float:
    """The same to a higher order; where a checkpoint takes twice the MTBF, the MTBF."""
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return young_interval(stall, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - stall


def expected_seconds(
    work: float, interval: float, stall: float, mtbf: float, restart: float
) -> float:
    """How long `work` seconds take with checkpoints and failures (Daly's equation 20).

    Failures are exponentially distributed, and may come while a checkpoint is written or while the
    run starts again.
    """
    segment = (interval + stall) / mtbf
    if segment > 100:  # nothing would ever be finished
        return math.inf
    return mtbf * math.exp(restart / mtbf) * math.expm1(segment) * work / interval


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

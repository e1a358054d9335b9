"""Checks whether a shared storage is fast enough for a run; no torch here.

The nodes share the storage's one rate: 100 GB/s over 100 nodes is 1 GB/s each. A node's need is
compared with its share, since all nodes need the storage at the same time.

The module also computes the cost of device failures and the best time between checkpoints.

Sources: Young 1974, "A First Order Approximation to the Optimum Checkpoint Interval"; Daly 2006, "A
Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", equations 20 and 37.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import Layout
from pipelines.planning.memory_state import adapter_parameters, state_of
from pipelines.planning.memory_training import FP32, Training
from pipelines.planning.step_time import trainable

# For one GPU, its host and its share of the network: Llama Team 2024, "The Llama 3 Herd of Models",
# section 3.3.4 counts 419 unexpected interruptions in 54 days on 16,384 H100.
DEVICE_MTBF_HOURS = 16_384 * 54 * 24 / 419
RESTART_SECONDS = 600.0  # from a failure to the next step: get a node, import, read the state


@dataclass(frozen=True)
class Failures:
    """The failures that a run must expect, and their cost.

    Attributes:
        mtbf_hours: Mean hours between failures of any of the run's devices.
        restarts: Expected number of restarts in the whole run.
        interval_seconds: The time between checkpoints that loses the least time.
        seconds: The run's expected length, with checkpoints, restarts and repeated work.
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
    """Return the failures that a run must expect, and their cost.

    Args:
        work_seconds: The time for the steps alone.
        devices: Number of devices; a failure of any stops the run until it is restarted.
        stall_seconds: How long a checkpoint keeps training waiting.
        device_mtbf_hours: Mean time between failures of one device.
        restart_seconds: The time from a failure until training continues.
    """
    mtbf = device_mtbf_hours * 3600 / devices
    interval = daly_interval(stall_seconds, mtbf)
    seconds = expected_seconds(work_seconds, interval, stall_seconds, mtbf, restart_seconds)
    return Failures(mtbf / 3600, seconds / mtbf, interval, seconds)


def young_interval(stall: float, mtbf: float) -> float:
    """Return Young's first-order optimum of seconds between checkpoints of `stall` seconds."""
    return math.sqrt(2 * stall * mtbf)


def daly_interval(stall: float, mtbf: float) -> float:
    """Return Daly's higher-order optimum; the MTBF if `stall` is at least twice the MTBF."""
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return young_interval(stall, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - stall


def expected_seconds(
    work: float, interval: float, stall: float, mtbf: float, restart: float
) -> float:
    """Return how long `work` seconds take with checkpoints and failures (Daly's equation 20).

    Failures are exponentially distributed, and may also happen while the run writes a checkpoint
    or restarts.
    """
    segment = (interval + stall) / mtbf
    if segment > 100:  # the run would practically never end
        return math.inf
    return mtbf * math.exp(restart / mtbf) * math.expm1(segment) * work / interval


Need = Literal["loader", "checkpoint", "start"]
LEAST_STALL = 1.0  # seconds, assumed: processes must agree on a save, however little they copy
START_SECONDS = 600.0  # the time in which a starting run should have read its state


@dataclass(frozen=True)
class Storage:
    """The rates of a storage for all nodes together, in bytes per second.

    Attributes:
        read: The rate of reading.
        write: The rate of writing.
    """

    read: float
    write: float

    def per_node(self, nodes: int) -> "Storage":
        """Return the rates that each of `nodes` nodes gets when all use the storage at once."""
        return Storage(self.read / nodes, self.write / nodes)


@dataclass(frozen=True)
class Demand:
    """The rate that a node needs for one purpose, and the rate that it gets.

    Attributes:
        name: The purpose.
        wanted: The needed bytes per second.
        given: The bytes per second of one node's share; None if the storage is unknown.
        seconds: The time for a step's data, a checkpoint or a start at the given rate.
    """

    name: Need
    wanted: float
    given: float | None
    seconds: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the storage is fast enough; None if the storage is unknown."""
        return None if self.given is None else self.given >= self.wanted


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of all files of one checkpoint, written by `torch.distributed.checkpoint`.

    Attributes:
        weights: Trained weights in fp32; the base model's frozen weights are not written.
        optimizer: The optimizer's moments.
    """

    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of weights and moments together."""
        return self.weights + self.optimizer


def checkpoint_size(config: DecoderConfig, training: Training) -> CheckpointSize:
    """Return the size of a checkpoint of this run, which does not depend on the layout."""
    trained = config.parameters
    if not training.trains_all:
        trained = adapter_parameters(config, training.adapter)
    alone = replace(training, layout=Layout(), sharding="none", rank=0)
    alone = replace(alone, cpu_offload=False, paged_moments=False)
    return CheckpointSize(trained * FP32, round(state_of(config, alone).optimizer))


def stall_seconds(size: CheckpointSize, training: Training, host_bandwidth: float | None) -> float:
    """Return the seconds until each process has copied its part of a checkpoint to host memory.

    Training waits only for this copy: the files are written while it continues. Replicas divide
    the work.
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
    """Return the rates that each node needs to read data, to write checkpoints and to start.

    Args:
        config: The model's shape.
        training: The layout and the batch sizes.
        nodes: The number of nodes that share the storage.
        step_seconds: The time of an optimizer step.
        checkpoint_seconds: The time between checkpoints.
        storage: The rates for all nodes together; None if they are unknown.
    """
    layout = training.layout
    id_bytes = 2 if config.vocab_size <= 1 << 16 else 4  # the size of an id in token shards
    samples = training.micro_batch * training.micro_batches * layout.dp
    # Each process reads the samples of its own data-parallel group.
    data = samples * training.sequence * id_bytes * layout.world / layout.dp / nodes
    size = checkpoint_size(config, training).total / nodes
    # Every replica reads its initial weights, and the moments too when a run resumes.
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

"""What failures of devices cost a long run, and how often to save it; no torch here.

Sources: Young 1974, "A First Order Approximation to the Optimum Checkpoint Interval"; Daly 2006, "A
Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", equations 20 and 37.
"""

import math
from dataclasses import dataclass

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

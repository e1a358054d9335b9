"""The workers and GPUs that each stage holds, and for how long: `usage.jsonl` in the workspace.

Each process writes its events as they happen: a stage's process writes its beginning and its end,
and rank 0 of training the workers and GPUs of each group that starts. So the sum is right however
often a stage was killed, resumed, or continued with another number of workers.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from pipelines.core.line_files import append_line, read_lines
from pipelines.run.progress import PROGRESS_FILE

USAGE = "usage.jsonl"
_HOUR = 3600.0
_log = logging.getLogger(__name__)

Event = Literal["began", "holds", "failed", "ended", "cached"]


class Usage(NamedTuple):
    """The resources that a stage has used in all its attempts together."""

    seconds: float
    worker_hours: float
    gpu_hours: float
    endings: int  # how often the stage finished: twice after a user's Clear
    last: float  # the time of the last event; seconds since 1970


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    event: Event
    time: float  # seconds since 1970
    workers: int = 0  # processes with one CPU each
    gpus: int = 0
    seen: float = 0.0  # for "began": when the workspace's progress was last written
    boot: str = ""  # which start of which machine `up` counts from
    up: float = 0.0  # seconds by a clock that nobody can set


@contextmanager
def metered(workspace: Path, stage: str) -> Iterator[None]:
    """Record the block as an attempt of the stage, which holds one CPU until `holds` is called."""
    progress = workspace / PROGRESS_FILE
    seen = progress.stat().st_mtime if progress.exists() else 0.0
    _append(workspace, stage, "began", workers=1, seen=seen)
    event: Event = "failed"
    try:
        yield
        event = "ended"
    finally:
        _append(workspace, stage, event)


def holds(workspace: Path, stage: str, *, workers: int, gpus: int) -> None:
    """Record that from now on the stage holds `workers` workers and `gpus` GPUs."""
    _append(workspace, stage, "holds", workers=workers, gpus=gpus)


def cached(workspace: Path, stage: str) -> None:
    """Record that the stage came from the cache, unless it already has events."""
    if not any(line.stage == stage for line in read_events(workspace)):
        _append(workspace, stage, "cached")


def usage_of(workspace: Path, stage: str) -> Usage:
    """Return the sum over all attempts of the stage in this workspace.

    A killed attempt counts until its last written progress.
    """
    lines = [line for line in read_events(workspace) if line.stage == stage]
    seconds = worker_seconds = gpu_seconds = 0.0
    for line, following in pairwise(lines):
        lasted = elapsed(line, following) if line.event in ("began", "holds") else 0.0
        if following.event == "began":
            lasted = max(0.0, lasted - max(0.0, following.time - following.seen))
        seconds += lasted
        worker_seconds += lasted * line.workers
        gpu_seconds += lasted * line.gpus
    endings = sum(line.event == "ended" for line in lines)
    last = lines[-1].time if lines else 0.0
    return Usage(seconds, worker_seconds / _HOUR, gpu_seconds / _HOUR, endings, last)


def elapsed(line: _Line, following: _Line) -> float:
    """Return the seconds between two events, whatever happened to the clock between them."""
    if line.boot and line.boot == following.boot:
        return following.up - line.up
    return max(0.0, following.time - line.time)


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # no Linux: times are by the clock


def span(workspace: Path, stage: str) -> tuple[float, float] | None:
    """Return the times of a stage's first and last event, seconds since 1970, or None."""
    times = [line.time for line in read_events(workspace) if line.stage == stage]
    return (min(times), max(times)) if times else None


def _append(workspace: Path, stage: str, event: Event, **values: float) -> None:
    """Append one line; a full disk must not stop the metered stage, so an error is a warning."""
    path = workspace / USAGE
    now = {"time": time.time(), "boot": _boot(), "up": time.monotonic()}
    line = _Line.model_validate({"stage": stage, "event": event, **now, **values})
    try:
        append_line(path, line.model_dump_json(exclude_defaults=True), durable=True)
    except OSError as error:
        _log.warning("%s: could not write event %s of stage %s: %s", path, event, stage, error)


def read_events(workspace: Path) -> list[_Line]:
    """Return the events of all stages, oldest first."""
    return read_lines(workspace / USAGE, _Line)

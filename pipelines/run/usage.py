"""What a stage holds of the cluster, and for how long: `usage.jsonl` in the workspace.

Whoever holds something says so as it happens: the stage's process its beginning and its end, rank 0
of training the workers and GPUs of each group that starts. So the sum is right however often a
stage was killed, resumed, or went on with another number of workers.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from pipelines.run.progress import PROGRESS_FILE

USAGE = "usage.jsonl"
_HOUR = 3600.0
_log = logging.getLogger(__name__)

Event = Literal["began", "holds", "failed", "ended", "cached"]


class Usage(NamedTuple):
    """What a stage has used, all its tries together."""

    seconds: float
    worker_hours: float
    gpu_hours: float
    endings: int  # how often the stage was finished: twice after a user's Clear
    last: float  # when something was written last; seconds since 1970


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    event: Event
    time: float  # seconds since 1970
    workers: int = 0  # processes, a CPU each
    gpus: int = 0
    seen: float = 0.0  # of a beginning: when the workspace's progress was written last


@contextmanager
def metered(workspace: Path, stage: str) -> Iterator[None]:
    """The block is a try of the stage; it holds one CPU until `holds` says more."""
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
    """From now on the stage holds so many workers and GPUs."""
    _append(workspace, stage, "holds", workers=workers, gpus=gpus)


def cached(workspace: Path, stage: str) -> None:
    """The stage came out of the cache; written once, and not behind a stage that has run."""
    if not any(line.stage == stage for line in _read(workspace)):
        _append(workspace, stage, "cached")


def usage_of(workspace: Path, stage: str) -> Usage:
    """The sum over all that the stage has done in this workspace.

    A try that was killed ends where its progress was last seen to move.
    """
    lines = [line for line in _read(workspace) if line.stage == stage]
    seconds = worker_seconds = gpu_seconds = 0.0
    for line, following in pairwise(lines):
        until = following.time if following.event != "began" else following.seen
        lasted = max(0.0, until - line.time) if line.event in ("began", "holds") else 0.0
        seconds += lasted
        worker_seconds += lasted * line.workers
        gpu_seconds += lasted * line.gpus
    endings = sum(line.event == "ended" for line in lines)
    last = lines[-1].time if lines else 0.0
    return Usage(seconds, worker_seconds / _HOUR, gpu_seconds / _HOUR, endings, last)


def _append(workspace: Path, stage: str, event: Event, **values: float) -> None:
    """One write of one line in append mode, after a line that a full disk may have torn.

    A disk that is full now must not end what is metered: that is a warning, and costs nothing.
    """
    path = workspace / USAGE
    line = _Line.model_validate({"stage": stage, "event": event, "time": time.time(), **values})
    text = line.model_dump_json(exclude_defaults=True) + "\n"
    try:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + text)
    except OSError as error:
        _log.warning("%s: %s of %s is not noted: %s", path, event, stage, error)


def _read(workspace: Path) -> list[_Line]:
    path = workspace / USAGE
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(_Line.model_validate_json(text))
        except ValueError:  # torn
            continue
    return lines

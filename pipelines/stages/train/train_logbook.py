"""The logbook of what happens to a training run; rank 0 writes it."""

import os
import socket
from math import prod
from pathlib import Path

from pipelines.run.logbook import Entry, Kind, note
from pipelines.run.progress import last_progress
from pipelines.run.records import TrainRecord
from pipelines.stages.stage_process import RAY_JOB_VARIABLE
from pipelines.training.hooks import Events

STAGE = TrainRecord.stage
_HOUR = 3600.0
_WORKERS_CHANGED: Kind = "workers changed"
_LAYOUT_CHANGE: Kind = "layout change"

Facts = dict[str, bool | int | str]  # a layout and its precision, by the recipe's keys


def job() -> str:
    """Return the name of this job; a run's training may take several jobs."""
    return os.environ.get(RAY_JOB_VARIABLE) or "by hand"


class TrainLogbook(Events):
    """The logbook of one training process, which notes each event once."""

    def __init__(self, workspace: Path, layout: Facts, before: Facts | None, steps: int) -> None:
        """Read the progress of the try before; this must happen before this try writes anything.

        Args:
            workspace: The run's workspace.
            layout: The layout of this try.
            before: The layout of the try before, or None if there was none.
            steps: The number of steps of the whole training.
        """
        self._workspace = workspace
        self._layout, self._before = layout, before
        self._steps = steps
        self._workers = _workers(layout)
        self._last = last_progress(workspace, STAGE)
        self._life = f"{job()}, {socket.gethostname()}:{os.getpid()}"

    def begin_training(self, step: int) -> None:
        """Note a start or a resumption, and the changes since the try before."""
        on = f"on {self._workers} workers"
        if self._write("start", "start", "the stage was started", f"trains {on}", step=step):
            return
        self._write(
            "resume",
            f"resume: {self._life}",
            "the try before this one has ended",
            f"training goes on after step {step} of {self._steps} {on}",
            step=step,
            hours=self._hours_lost(step),
        )
        then = self._layout | (self._before or {})  # a run of an earlier version noted less
        if then == self._layout:
            return
        changed = ", ".join(
            f"{k}: {then[k]} → {v}" for k, v in self._layout.items() if then[k] != v
        )
        workers = _workers(then)
        cause, kind = f"{workers} → {self._workers} workers", _WORKERS_CHANGED
        if workers == self._workers:
            cause, kind = "the layout has changed", _LAYOUT_CHANGE
        self._write(kind, f"{kind}: {self._life}", cause, changed, step=step)

    def note(
        self,
        kind: Kind,
        key: str,
        cause: str,
        done: str,
        *,
        step: int | None = None,
        seconds_lost: float | None = None,
    ) -> None:
        """Write an entry."""
        hours = None if seconds_lost is None else seconds_lost * self._workers / _HOUR
        self._write(kind, key, cause, done, step=step, hours=hours)

    def ended(self, step: int, model_hash: str) -> None:
        """Note that the stage has its result."""
        done = f"model {model_hash[:12]}"
        self._write("end", f"end: {self._life}", "training is complete", done, step=step)

    def _hours_lost(self, step: int) -> float | None:
        """Return all workers' hours for the steps that are repeated, or None if unknown."""
        if self._last is None:
            return None
        again = max(0.0, self._last.done - step)
        if not again:
            return 0.0
        if not self._last.rate:  # it ended too soon to have one
            return None
        workers = _workers(self._before) if self._before else self._workers
        return again / self._last.rate * workers / _HOUR

    def _write(
        self,
        kind: Kind,
        key: str,
        cause: str,
        done: str,
        *,
        step: int | None = None,
        hours: float | None = None,
    ) -> bool:
        entry = Entry(
            kind=kind,
            key=f"{STAGE}: {key}",
            stage=STAGE,
            cause=cause,
            done=done,
            step=step,
            worker_hours_lost=hours,
        )
        return note(self._workspace, entry)


def out_of_memory(workspace: Path, tried: str, done: str) -> None:
    """Note that a device ran out of memory; the notes of several processes are one event."""
    key = f"{STAGE}: out of memory: {job()}: {tried}"
    cause = f"out of memory with {tried}"
    note(workspace, Entry(kind="out of memory", key=key, stage=STAGE, cause=cause, done=done))


def _workers(layout: Facts) -> int:
    sizes = (size for key, size in layout.items() if key.startswith("parallel."))
    return prod(size for size in sizes if isinstance(size, int))

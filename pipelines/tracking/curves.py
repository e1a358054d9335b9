"""The points of a run's curves on their way to MLflow: each step once, whatever dies meanwhile.

A point is kept in a file, with its time, before a thread sends it. The process that goes on after
another one was killed asks MLflow which steps arrived, and sends those that did not. A step that is
made a second time, after a failure or a rollback, is not sent again.

One value of one metric, as MLflow keeps it.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipelines.core.line_files import LineFile, parse_lines

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Point:
    """A value at a step and a time."""

    key: str
    value: float
    milliseconds: int  # since 1970
    step: int


def points_now(metrics: Mapping[str, float], step: int) -> list[Point]:
    """Return a point of each metric."""
    now = int(time.time() * 1000)
    return [Point(allowed_name(key), float(value), now, step) for key, value in metrics.items()]


def allowed_name(key: str) -> str:
    """Return a dataset version in it as `name:N`: MLflow allows no `@` in a metric's or param's
    name.
    """
    return key.replace("@", ":")


_METRICS_A_BATCH = 1000  # MLflow's limit
_RETRY_S = 5.0  # from a failed try to the next; the client has retried by itself before that
_PATIENCE_S = 600.0  # with a server that is away at the end

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    """The values of all curves at one step."""

    step: int
    milliseconds: int  # since 1970
    values: dict[str, float]


class Curves:
    """Sends points from a thread of its own; nobody waits for the server before `close`."""

    def __init__(
        self, run_id: str, client: "Callable[[], MlflowClient]", kept: Path | None
    ) -> None:
        """Take up what an earlier process left.

        Args:
            run_id: MLflow's.
            client: Makes the client, in the thread: its import takes seconds.
            kept: The file; None where the run ends with the process.
        """
        self._run_id = run_id
        self._client = client
        self._file = LineFile(kept) if kept else None
        lines = self._file.read() if self._file else []
        self._waiting = parse_lines(lines, Step)
        self._steps = {each.step for each in self._waiting}
        self._arrived: set[int] | None = None if lines else set()
        self._changed = threading.Condition()
        self._closing = False
        self._given_up = threading.Event()
        # Killed with the process, even where it waits for a server that is away.
        self._thread = threading.Thread(target=self._work, name="mlflow-curves", daemon=True)
        if self._waiting:
            self._thread.start()

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve, unless they have that step; returns at once."""
        if step in self._steps:
            return
        self._steps.add(step)
        point = Step(step, int(time.time() * 1000), dict(values))
        if self._file:
            self._file.append(json.dumps(point._asdict()))
        with self._changed:
            self._waiting.append(point)
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    def close(self, patience: float | None = None) -> None:
        """Wait until all arrived, so many seconds at most; warns of points that did not."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_S if patience is None else patience)
        self._given_up.set()
        if left := sum(len(each.values) for each in self._waiting):
            _log.warning("%d metric points did not reach MLflow", left)

    def _work(self) -> None:
        while not self._given_up.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                steps = list(self._waiting)
            if not steps:
                return
            try:
                self._send(steps)
            except Exception as error:
                _log.warning("MLflow did not take %d steps, kept: %s", len(steps), error)
                self._given_up.wait(_RETRY_S)
                continue
            with self._changed:
                del self._waiting[: len(steps)]

    def _send(self, steps: list[Step]) -> None:
        client = self._client()
        if self._arrived is None:
            # All curves of a step go in one request, so one of them tells of all.
            key = next(iter(steps[0].values))
            self._arrived = {m.step for m in client.get_metric_history(self._run_id, key)}
        from mlflow.entities import Metric

        for batch in _batches(each for each in steps if each.step not in self._arrived):
            points = (
                Metric(key, value, each.milliseconds, each.step)
                for each in batch
                for key, value in each.values.items()
            )
            # One that got through though the answer didn't is the same by key, step, time and
            # value, and MLflow keeps it once.
            client.log_batch(self._run_id, metrics=list(points))
            self._arrived.update(each.step for each in batch)


def _batches(steps: Iterator[Step]) -> Iterator[list[Step]]:
    """Whole steps, as many as one request may hold."""
    batch: list[Step] = []
    for step in steps:
        if batch and sum(len(each.values) for each in (*batch, step)) > _METRICS_A_BATCH:
            yield batch
            batch = []
        batch.append(step)
    if batch:
        yield batch

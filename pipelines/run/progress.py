"""The progress of stages: one JSON line per event, appended by a writer, read by any reader."""

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from pipelines.core.line_files import append_line, parse_lines

PROGRESS_FILE = "progress.jsonl"
_TAIL = 1 << 16  # the file's last bytes, which contain the last line of a stage that just ran

_log = logging.getLogger(__name__)


class Progress(BaseModel):
    """The progress of a stage."""

    model_config = ConfigDict(frozen=True, extra="allow")

    stage: str
    done: float
    total: float | None = None
    unit: str
    rate: float | None = None  # units per second
    eta: float | None = None  # seconds
    loss: float | None = None  # nats per token
    tokens_per_second: float | None = None  # over all processes
    note: str | None = None  # what the stage does instead of getting on

    def line(self) -> str:
        """Return a line such as `train 12/40 steps, 4.1 steps/s, loss 2.3102, 7 s left`."""
        of = f"/{self.total:,.0f}" if self.total else ""
        parts = [f"{self.stage} {self.done:,.0f}{of} {self.unit}"]
        if self.rate:
            parts.append(f"{self.rate:,.3g} {self.unit}/s")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.eta is not None:
            parts.append(f"{self.eta:.0f} s left")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


class ProgressMeter:
    """Rate and remaining time of one piece of work, told at most once every `interval` seconds."""

    def __init__(self, stage: str, tell: Callable[[Progress], None], interval: float = 1.0) -> None:
        self._tell = tell
        self._stage = stage
        self._interval = interval
        self._first: tuple[float, float] | None = None  # done, time; resumed jobs start late
        self._last = float("-inf")

    def write(
        self,
        done: float,
        total: float | None,
        unit: str,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        force: bool = False,
    ) -> None:
        """Tell the progress; use `force` for the last line of a stage."""
        now = time.monotonic()
        if not force and now - self._last < self._interval:
            return
        self._last = now
        self._first = self._first or (done, now)
        gained, elapsed = done - self._first[0], now - self._first[1]
        rate = gained / elapsed if elapsed > 0 else None
        eta = (total - done) / rate if total and rate else None
        progress = Progress(
            stage=self._stage,
            done=done,
            total=total,
            unit=unit,
            rate=rate,
            eta=eta,
            loss=loss,
            tokens_per_second=tokens_per_second,
        )
        self._tell(progress)


def meter_on_stderr(stage: str) -> ProgressMeter:
    """Return a meter that prints a line with the remaining time to stderr every few seconds."""

    def tell(progress: Progress) -> None:
        sys.stderr.write(f"{progress.line()}\n")
        sys.stderr.flush()

    return ProgressMeter(stage, tell, interval=5)


class ProgressWriter(ProgressMeter):
    """A writer of a workspace's progress file, with at most one line every `interval` seconds."""

    def __init__(self, workspace: Path, stage: str, interval: float = 1.0) -> None:
        super().__init__(stage, partial(_append, workspace / PROGRESS_FILE), interval)


def add_note(workspace: Path, stage: str, text: str) -> None:
    """Write a stage's last progress again with a note, unless it has made none."""
    if last := last_progress(workspace, stage):
        noted = last.model_copy(update={"note": text, "eta": None})
        _append(workspace / PROGRESS_FILE, noted)


def _append(path: Path, progress: Progress) -> None:
    try:
        append_line(path, progress.model_dump_json(exclude_none=True))
    except OSError as error:  # progress must not stop the stage that it reports
        _log.warning("could not write %s: %s", path, error)


def last_progress(workspace: Path, stage: str) -> Progress | None:
    """Return the last written progress of a stage."""
    path = workspace / PROGRESS_FILE
    end = max(0, path.stat().st_size - _TAIL) if path.exists() else 0
    lines = [each for each in ProgressReader(workspace, end).read() if each.stage == stage]
    return lines[-1] if lines else None


class ProgressReader:
    """A reader of the lines that were appended since the last read."""

    def __init__(self, workspace: Path, offset: int = 0) -> None:
        self._path = workspace / PROGRESS_FILE
        self.offset = offset  # bytes read so far

    @classmethod
    def at_end(cls, workspace: Path) -> Self:
        """Return a reader of the lines that are appended from now on."""
        path = workspace / PROGRESS_FILE
        return cls(workspace, path.stat().st_size if path.exists() else 0)

    def read(self) -> list[Progress]:
        """Return the new complete lines, oldest first."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return parse_lines(whole.splitlines(), Progress)

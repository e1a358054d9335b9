"""Progress is data: one JSON line an event, appended by one writer, tailed by any reader."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

PROGRESS_FILE = "progress.jsonl"
_TAIL = 1 << 16  # bytes in which a stage that just ran has its last line

_log = logging.getLogger(__name__)


class Progress(BaseModel):
    """How far a stage is."""

    model_config = ConfigDict(frozen=True, extra="allow")

    stage: str
    done: float
    total: float | None = None
    unit: str
    rate: float | None = None  # units a second
    eta: float | None = None  # seconds
    loss: float | None = None  # nats a token
    tokens_per_second: float | None = None  # over all processes

    def line(self) -> str:
        """For a user: `train 12/40 steps, 4.1 steps/s, loss 2.3102, 4,200 tokens/s, 7 s left`."""
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
        return ", ".join(parts)


class ProgressWriter:
    """Appends to a workspace's progress file; at most one line every `interval` seconds."""

    def __init__(self, workspace: Path, stage: str, interval: float = 1.0) -> None:
        self._path = workspace / PROGRESS_FILE
        self._stage = stage
        self._interval = interval
        self._first: tuple[float, float] | None = None  # done and time: a resumed job begins late
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
        """Record progress; the last one of a stage is written with `force`."""
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
        line = progress.model_dump_json(exclude_none=True) + "\n"
        try:
            # One write of one line in append mode: a reader never sees half a line of two writers.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:  # it must not end what it tells of
            _log.warning("%s can't be written: %s", self._path, error)


def last_progress(workspace: Path, stage: str) -> Progress | None:
    """How far a stage was told to be last."""
    path = workspace / PROGRESS_FILE
    end = max(0, path.stat().st_size - _TAIL) if path.exists() else 0
    lines = [each for each in ProgressReader(workspace, end).read() if each.stage == stage]
    return lines[-1] if lines else None


class ProgressReader:
    """Reads what was appended since the last look."""

    def __init__(self, workspace: Path, offset: int = 0) -> None:
        self._path = workspace / PROGRESS_FILE
        self.offset = offset  # bytes read so far

    @classmethod
    def at_end(cls, workspace: Path) -> Self:
        """A reader of what comes from now on."""
        path = workspace / PROGRESS_FILE
        return cls(workspace, path.stat().st_size if path.exists() else 0)

    def read(self) -> Iterator[Progress]:
        """New whole lines, oldest first."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self.offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self.offset += len(raw)
                # A full disk can leave half a line, which the next one then ends.
                with suppress(ValidationError):
                    yield Progress.model_validate_json(raw)

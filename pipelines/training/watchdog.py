"""Tells which process a run waits for.

Each process notes where it is; a thread of it writes that to a file that all share, and another
one of rank 0 looks whether the files change. Only rank 0's clock counts. A process that stands
still writes its own Python stacks, by a timer in C that needs no lock of Python's.
"""

import contextlib
import faulthandler
import json
import logging
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from pipelines.core.storage import write_text
from pipelines.training.events import Events

Phase = Literal["data", "forward and backward", "optimizer", "report", "checkpoint"]
_LOOKS = 4  # at each file within the time allowed

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """What rank 0 last read of a process, and when that was new."""

    note: dict[str, Any]
    since: float


class Watchdog:
    """Warns of processes that do not move; used as a context manager around the steps."""

    def __init__(
        self, folder: Path, rank: int, world: int, seconds: float, events: Events | None = None
    ) -> None:
        """Nothing starts before the block is entered.

        Args:
            folder: Shared by all processes: `rank-N.json` says where each is, and
                `rank-N.stacks.txt` what it did when it stood still.
            rank: Of this process.
            world: How many there are.
            seconds: Without a move, until there is a warning.
            events: Told of it, too; by rank 0.
        """
        self._folder = folder
        self._rank = rank
        self._world = world
        self._seconds = seconds
        self._events = events or Events()
        self._note: dict[str, Any] = {}
        self._beats = 0
        self._armed = float("-inf")
        self._over = threading.Event()
        self._seen: dict[int, _Seen] = {}
        self._warned: set[int] = set()
        self._threads = [threading.Thread(target=self._write, daemon=True)]
        if rank == 0:
            self._threads.append(threading.Thread(target=self._watch, daemon=True))

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self._folder / f"rank-{self._rank}.stacks.txt").open("w")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._stacks.close()

    def beat(self, step: int, phase: Phase) -> None:
        """Note where the process is."""
        self._beats += 1
        self._note = {"step": step, "phase": phase, "beats": self._beats}
        now = time.monotonic()
        if now - self._armed > self._seconds / _LOOKS:  # to set the timer takes 0.1 ms
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, file=self._stacks)

    def _write(self) -> None:
        path = self._folder / f"rank-{self._rank}.json"
        who = {"rank": self._rank, "host": socket.gethostname()}
        failed = False
        while not self._over.is_set():
            try:
                write_text(path, json.dumps(who | self._note))
                failed = False
            except OSError as error:
                if not failed:  # training goes on; this tells what rank 0 may warn of wrongly
                    _log.warning("where this process is can't be written: %s", error)
                failed = True
            self._over.wait(self._seconds / _LOOKS)
        path.unlink(missing_ok=True)  # a process that is done is not one that stands still

    def _watch(self) -> None:
        while not self._over.wait(self._seconds / _LOOKS):
            still = self._read_heartbeats(time.monotonic())
            if still and not self._warned.issuperset(still):
                self._warn(list(still.values()))
            self._warned = set(still)

    def _warn(self, still: list[dict[str, Any]]) -> None:
        line = warning(still, self._seconds, self._folder)
        _log.warning("%s", line)
        step = min(note["step"] for note in still)
        self._events.note("stall", f"stall: {line}", line, "all stacks are kept", step=step)

    def _read_heartbeats(self, now: float) -> dict[int, dict[str, Any]]:
        """Where those are that have not moved for too long, by their ranks."""
        still = {}
        for rank in range(self._world):
            note: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):  # it begins late, or is done
                text = (self._folder / f"rank-{rank}.json").read_text(encoding="utf-8")
                note = json.loads(text)
            if rank not in self._seen or self._seen[rank].note != note:
                self._seen[rank] = _Seen(note, now)
            elif "step" in note and now - self._seen[rank].since >= self._seconds:
                still[rank] = note
        return still


def warning(still: list[dict[str, Any]], seconds: float, folder: Path) -> str:
    """One line that names those who are furthest behind: the others mostly wait for them."""
    # All go through the same phases, so who has begun fewer of them is behind.
    last = min((note["step"], note["beats"]) for note in still)
    behind = [note for note in still if (note["step"], note["beats"]) == last]
    names = ", ".join(f"rank {note['rank']} on {note['host']}" for note in behind)
    step, phase = behind[0]["step"], behind[0]["phase"]
    others = len(still) - len(behind)
    waiting = f"; {others} more wait further on" if others else ""
    return (
        f"no move for {seconds:g} s: {names} at step {step}, in {phase}{waiting}; "
        f"Python stacks: {folder}/rank-*.stacks.txt"
    )

"""Warns of the processes that a stalled run waits for.

Each process notes how far it is, and one of its threads writes that to a file in a shared folder.
Another thread of rank 0 checks by rank 0's clock whether the files change. A stalled process writes
its own Python stacks, by a timer in C that does not need Python's interpreter lock.
"""

import contextlib
import faulthandler
import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from pipelines.core.storage import write_text
from pipelines.training.hooks import Events, Hook, Phase

_LOOKS = 4  # reads of each file within the allowed time

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """The last note that rank 0 read of a process, and the time when it first read this note."""

    note: dict[str, Any]
    since: float


class Watchdog(Hook):
    """Context manager around the training steps that warns of processes that do not move."""

    def __init__(
        self, folder: Path, rank: int, world: int, seconds: float, events: Events | None = None
    ) -> None:
        """Set up the watchdog; its threads start when the block is entered.

        Args:
            folder: A folder that all processes share. `rank-N.json` says how far rank N is, and
                `rank-N.stacks.txt` holds its stacks from when it stalled.
            rank: The rank of this process.
            world: The number of processes.
            seconds: The time without a move after which there is a warning.
            events: Rank 0 notes each warning here, too.
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

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._stacks.close()

    def enter_phase(self, step: int, phase: Phase) -> None:
        """Note the step and the phase that the process is in."""
        self._beats += 1
        self._note = {"step": step, "phase": phase, "beats": self._beats}
        now = time.monotonic()
        if now - self._armed > self._seconds / _LOOKS:  # setting the timer takes 0.1 ms
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
                if not failed:  # training goes on, but rank 0 may now warn of this process wrongly
                    _log.warning("this process's progress can't be written: %s", error)
                failed = True
            self._over.wait(self._seconds / _LOOKS)
        path.unlink(missing_ok=True)  # a process that is done must not look stalled

    def _watch(self) -> None:
        failed = False
        while not self._over.wait(self._seconds / _LOOKS):
            try:
                still = self._read_heartbeats(time.monotonic())
                failed = False
            except OSError as error:
                if not failed:  # it watches again as soon as it can
                    _log.warning("the processes' progress can't be read: %s", error)
                failed = True
                continue
            if still and not self._warned.issuperset(still):
                self._warn(list(still.values()))
            self._warned = set(still)

    def _warn(self, still: list[dict[str, Any]]) -> None:
        line = warning(still, self._seconds, self._folder)
        _log.warning("%s", line)
        step = min(note["step"] for note in still)
        self._events.note("stall", f"stall: {line}", line, "all stacks are kept", step=step)

    def _read_heartbeats(self, now: float) -> dict[int, dict[str, Any]]:
        """Return the notes of the processes that have not moved for too long, by rank."""
        still = {}
        for rank in range(self._world):
            note: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):  # the process starts late, or is done
                text = (self._folder / f"rank-{rank}.json").read_text(encoding="utf-8")
                note = json.loads(text)
            if rank not in self._seen or self._seen[rank].note != note:
                self._seen[rank] = _Seen(note, now)
            elif "step" in note and now - self._seen[rank].since >= self._seconds:
                still[rank] = note
        return still


def warning(still: list[dict[str, Any]], seconds: float, folder: Path) -> str:
    """Return a line that names the processes furthest behind; the others mostly wait for them."""
    # All processes go through the same phases, so one that has begun fewer phases is behind.
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

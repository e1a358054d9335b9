"""Runs the parts one after another, each in time, and keeps what they found; no torch here.

A result is a JSON file, written at once. A second run keeps the results of the same code, commit,
device, driver and torch, so that the whole may be done in several goes.
"""

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.doctor.all_reduce import reason_of
from tests.benchmarks.__main__ import RESULTS, gpus
from tests.benchmarks.harness import PROJECT
from tests.gpu_acceptance.acceptance_parts import HERE, MOST_SECONDS, WHEELS, Part

Result = dict[str, Any]
_CODE = ("pipelines", "tests/benchmarks", "tests/gpu_acceptance")
_FAKE_TIMES = 20
_MOST_CHARACTERS = 200  # of the line that says why a part failed
ENDED = ("reached", "missed")  # the states of a part that need not run again


@dataclass(frozen=True)
class Flow:
    """All parts on one machine.

    Attributes:
        out: The folder of the results.
        fake: Whether to compute on the CPU, with tiny models.
        told: Is given a line about each part.
        most_seconds: For all parts of one GPU together.
        module: What runs a part.
    """

    out: Path
    fake: bool
    told: Callable[[str], None]
    module: str = f"{HERE}.run_part"
    most_seconds: float = MOST_SECONDS

    def run(self, parts: Iterable[Part]) -> list[Result]:
        """Run what has no result yet.

        Raises:
            UserError: this machine lacks something, or the results would lie among real ones.
        """
        cards = [] if self.fake else gpus()
        self._check(cards)
        who, began = identity(cards), time.perf_counter()
        return [
            self._kept(part, who) or self._new(part, who, self._limit(part, began))
            for part in parts
            if self.fake or len(cards) >= part.gpus
        ]

    def path(self, part: Part) -> Path:
        """The file of a part's result."""
        return self.out / f"gpu-{part.name}.json"

    def _limit(self, part: Part, began: float) -> float:
        """Seconds that it may take; a busy machine without a GPU has more of them."""
        if self.fake:
            return part.seconds * _FAKE_TIMES
        left = began + self.most_seconds - time.perf_counter()
        return part.seconds if part.gpus > 1 else min(part.seconds, max(0.0, left))

    def _check(self, cards: list[dict[str, str]]) -> None:
        needed = {"torch": "torch", "transformers": "transformers"} | WHEELS
        missing = [name for name, module in needed.items() if find_spec(module) is None]
        if missing:
            raise UserError(f"gpu-acceptance: install {', '.join(missing)}; see docs/training.md")
        if self.fake and self.out.resolve() == RESULTS:
            raise UserError(f"gpu-acceptance: fake figures must not lie in {RESULTS}; give --out")
        if not self.fake and not cards:
            raise UserError("gpu-acceptance: nvidia-smi names no GPU; --fake tries all without one")

    def _kept(self, part: Part, who: dict[str, str]) -> Result | None:
        """The result of an earlier run, if there is one to keep."""
        found = _ended(self.path(part), who)
        if found:
            self.told(f"{part.name}: kept from an earlier run")
        return found

    def _new(self, part: Part, who: dict[str, str], limit: float) -> Result:
        began = time.perf_counter()
        found = self._outcome(part, who, limit)
        seconds = time.perf_counter() - began
        command = f"python -m {HERE} {'--fake ' * self.fake}{part.name}"
        result = {
            "part": part.name,
            "goal": part.goal,
            "must": part.must,
            "seconds": round(seconds, 1),
            "command": command,
            **who,
            **found,
        }
        write_json(self.path(part), result)
        self.told(f"{part.name}: {result['state']} after {seconds:.0f} s")
        return result

    def _outcome(self, part: Part, who: dict[str, str], limit: float) -> Result:
        """What the part's process found, or in one line why it found nothing."""
        nothing = {"figure": None, "unit": "", "ratio": None, "limits": "", "detail": {}}
        log = self.out / f"{part.name}.log"
        with _empty(self.out / "scratch") as folder, log.open("w") as lines:
            answer = folder / "outcome.json"
            place = {"folder": str(folder), "fake": self.fake, "earlier": self._earlier(who)}
            code = self._process(part, place, lines, limit)
            if code == 0:
                found: Result = read_json(answer)
                return found | {"state": "reached" if found.pop("reached") else "missed"}
        if code is None:
            why = f"over {limit:.0f} s" + "; run it again" * (limit < part.seconds)
            return nothing | {"state": "out of time", "limits": why}
        if code < 0:
            why = f"ended by {signal.Signals(-code).name}"
        else:
            why = reason_of(log.read_text()) or f"exit code {code}"
        return nothing | {"state": "failed", "limits": why[:_MOST_CHARACTERS]}

    def _process(self, part: Part, place: Result, log: IO[str], limit: float) -> int | None:
        """Run it, and return its exit code; None if it ran out of time."""
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        seen = {} if part.gpus > 1 else {"CUDA_VISIBLE_DEVICES": cards.partition(",")[0]}
        seen["PYTHONDONTWRITEBYTECODE"] = ""  # each part would compile all of torch's Python again
        process = subprocess.Popen(
            [sys.executable, "-m", self.module, part.name],
            cwd=PROJECT,
            env=os.environ | seen,
            stdin=subprocess.PIPE,  # stays open, as the part ends when it is closed
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            with suppress(BrokenPipeError):  # it ended before it read, and its code says so
                assert process.stdin
                process.stdin.write(json.dumps(place) + "\n")
                process.stdin.flush()
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)

    def _earlier(self, who: dict[str, str]) -> dict[str, Result]:
        found = (_ended(path, who) for path in self.out.glob("gpu-*.json"))
        return {each["part"]: each for each in found if each}


def _ended(path: Path, who: dict[str, str]) -> Result | None:
    """A part's result, if it is whole, of a part that ended, and of the same code and machine."""
    try:
        found: Result = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    same = who.items() <= found.items()
    return found if same and found["state"] in ENDED else None


def _end(process: "subprocess.Popen[str]") -> None:
    """End a part's process, and whatever it started."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _empty(folder: Path) -> Iterator[Path]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def identity(cards: list[dict[str, str]]) -> dict[str, str]:
    """What a result is of; without cards, of nothing but a CPU."""
    names = ", ".join(card["name"] for card in cards)
    return {
        "device": names or f"FAKE, no GPU: {platform.machine()} CPU",
        "driver": cards[0]["driver_version"] if cards else "none",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": _commit(),
        "code": _code(),
    }


def _commit() -> str:
    """As git names it; a copy of the files alone has none, and is known by its code."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    told = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def _code() -> str:
    digest = hashlib.sha256()
    files = (path for room in _CODE for path in (PROJECT / room).rglob("*") if path.is_file())
    for path in sorted(files):
        if path.suffix in (".py", ".yaml") or path.name == "predicted.json":
            digest.update(f"{path.relative_to(PROJECT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]

"""How many workers a DataLoader is fastest with: tried before the rounds."""

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.benchmarks.contender import Round

_TRIED = (0, 1, 2, 4)  # more than processors, too: the warning of it is known
_TRIAL_BATCHES = 300


def rounds_of_best(
    build: Callable[[int], DataLoader], folder: Path, options: dict[str, Any]
) -> Round:
    """Rounds that go on with the loader of the best worker setting, epoch after epoch."""
    seconds = {workers: _trial(build(workers), folder, options) for workers in _TRIED}
    best = min(seconds, key=seconds.__getitem__)
    batches = _endless(build(best))
    next(batches)

    def run_round() -> tuple[float, dict[str, Any]]:
        tokens = sum(next(batches)[0].numel() for _ in range(options["batches"]))
        return tokens, {"workers": best}

    return run_round


def _trial(loader: DataLoader, folder: Path, options: dict[str, Any]) -> float:
    batches = _endless(loader)
    next(batches)  # the workers' start does not count
    if options["cold"]:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    for _ in range(_TRIAL_BATCHES):
        next(batches)
    seconds = time.perf_counter() - began
    batches.close()  # ends its workers
    return seconds


def _endless(loader: DataLoader) -> Generator[Any, None, None]:
    while True:
        yield from loader

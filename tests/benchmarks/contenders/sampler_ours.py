"""Penstock's sampler: a keyed permutation of which the step is the whole state."""

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

from pipelines.loading.sampler import samples
from tests.benchmarks.contender import Round, serve


def prepare(_folder: Path, options: dict[str, Any]) -> Round:
    total = options["tokens"] // options["sequence"]
    batch, steps = options["global_batch"], options["steps"]
    tracemalloc.start()
    samples(1, 12_345, 0, 1, batch, total)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    step = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal step
        step += 1_000_003  # another place in the run, nothing of which is at hand
        count = sum(len(samples(1, step + each, 0, 1, batch, total)) for each in range(steps))
        state = {"state_bytes": len(pickle.dumps(step)), "peak_memory_bytes": peak}
        return count, state

    return run_round


if __name__ == "__main__":
    serve(prepare)

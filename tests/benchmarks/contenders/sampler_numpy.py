"""A permutation that is made and kept."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.contender import Round, serve


def prepare(_folder: Path, options: dict[str, Any]) -> Round:
    batch, steps = options["global_batch"], options["steps"]
    seed = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal seed
        seed += 1
        order = np.random.default_rng(seed).permutation(options["samples"])
        count = sum(len(order[step * batch : (step + 1) * batch]) for step in range(steps))
        return count, {"state_bytes": order.nbytes}

    return run_round


if __name__ == "__main__":
    serve(prepare)

"""scipy.stats.bootstrap, paired and vectorised, of the improvement alone."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

from tests.benchmarks.contender import Round, serve

Array = np.ndarray[Any, Any]


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    ours, theirs = (pq.read_table(folder / f"{name}.parquet") for name in ("ours", "theirs"))
    bits = (theirs["nats"].to_numpy() - ours["nats"].to_numpy()) / np.log(2)
    sizes = ours["bytes"].to_numpy().astype(float)

    def improvement(difference: Array, size: Array, axis: int) -> Array:
        return difference.sum(axis) / size.sum(axis)  # type: ignore[no-any-return]

    def run_round() -> tuple[float, dict[str, Any]]:
        found = stats.bootstrap(
            (bits, sizes),
            improvement,
            paired=True,
            n_resamples=options["resamples"],
            batch=50,
            method="percentile",
            confidence_level=0.9,
            rng=np.random.default_rng(0),
        )
        low = float(found.confidence_interval.low)
        return options["resamples"], {"documents": len(bits), "lower bound": low}

    return run_round


if __name__ == "__main__":
    serve(prepare)

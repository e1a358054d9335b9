"""Penstock's gate: two tables of scores in, a verdict out."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.evaluation.gate import Measured, decide
from pipelines.recipe.recipe import Register
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    pa.set_cpu_count(1)
    ours, theirs = (pq.read_table(folder / f"{name}.parquet") for name in ("ours", "theirs"))
    before = _peak_mib()

    took: list[float] = []

    def run_round() -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        found = decide(Measured("a", ours), Measured("b", theirs), Register()).comparison
        took.append(time.perf_counter() - began)
        assert found is not None
        assert found.resamples == options["resamples"]
        return found.resamples, {
            "seconds a decision": statistics.median(took[1:] or took),  # the first warms up
            "documents": found.documents,
            "slices": len(found.slices),
            "lower bound": found.improvement.lower,
            "MiB more": _peak_mib() - before,
        }

    return run_round


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    serve(prepare)

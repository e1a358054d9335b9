"""Penstock's gate: two tables of scores in, a verdict out.

Only the decision is timed. Beside it stands what the gate sees and how often it errs, from
simulated models whose truth is known; this is computed once, in the round that warms up.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.evaluation import gate
from pipelines.evaluation.gate import Measured, decide
from pipelines.evaluation.spending import confidence_of
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Turn
from tests.benchmarks.contender import Round, serve
from tests.simulated_gates import CANDIDATES, least, power, years_that_promote

CONFIDENCE = Register().confidence
GAINS = (0.005, 0.01, 0.02, 0.05)
NUMBERS = (1, 10, CANDIDATES)
# Shares of the error by the candidate's number, before they are divided by the sum over all.
SERIES = {"k^-2": (2.0, 1.644934), "k^-1.5": (1.5, 2.612375), "k^-1.3": (1.3, 3.931949)}


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    pa.set_cpu_count(1)
    ours, theirs = (pq.read_table(folder / f"{name}.parquet") for name in ("ours", "theirs"))
    before = _peak_mib()

    took: list[float] = []
    simulated: dict[str, Any] = {}
    turn = Turn(number=CANDIDATES, uses=CANDIDATES)

    def run_round() -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        found = decide(Measured("a", ours), Measured("b", theirs), Register(), turn).comparison
        took.append(time.perf_counter() - began)
        peak = _peak_mib()
        if not simulated:
            simulated.update(_simulated())
        assert found is not None
        assert found.resamples == options["resamples"]
        return found.resamples, {
            "seconds": took[-1],
            "seconds a decision": statistics.median(took[1:] or took),  # the first warms up
            "documents": found.documents,
            "slices": len(found.slices),
            "lower bound": found.improvement.lower,
            "MiB more": peak - before,
            **simulated,
        }

    return run_round


def _simulated() -> dict[str, Any]:
    """Return the gate's power and errors, as shares of gates or years."""
    asked = [CONFIDENCE, *(confidence_of(number, CONFIDENCE) for number in NUMBERS)]
    names = ["alone", *(f"candidate {number}" for number in NUMBERS)]
    seen = {gain: power(gain, 1000, asked) for gain in GAINS}
    numbers = np.arange(1, CANDIDATES + 1)
    series = {
        name: power(0.02, 200, 1 - (1 - CONFIDENCE) * numbers**-exponent / total)
        for name, (exponent, total) in SERIES.items()
    }
    sequence = [confidence_of(number, CONFIDENCE) for number in range(1, CANDIDATES + 1)]
    years, _ = years_that_promote(2000, least(sequence))
    gate.confidence_of = lambda number, confidence: confidence  # the gate before there were turns
    alone, _ = years_that_promote(200, least([CONFIDENCE] * CANDIDATES))
    gate.confidence_of = confidence_of
    return {
        "promoted by gain": {
            f"{gain:g}": dict(zip(names, shares.tolist(), strict=True))
            for gain, shares in seen.items()
        },
        "promoted at a gain of 0.02 by series": {
            name: {"first": shares[0], "mean of a year": shares.mean()}
            for name, shares in series.items()
        },
        "years of equal candidates that promote one": {
            "sequence": years / 2000,
            "alone": alone / 200,
        },
    }


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    serve(prepare)

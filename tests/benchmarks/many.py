"""Fifty runs queued at once, each a Ray job that does next to nothing: none is lost or doubled.

Every job writes its own name, so a lost one is missing and a doubled one is there twice: both end
the benchmark. The scheduler's and the triggerer's memory is their own process's, once the first
runs are over and once all are.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Limit
from tests.benchmarks.local_platform import local_platform

RUNS = 50


def make_data(_: Path) -> dict[str, Any]:
    """Nothing but how many."""
    return {"runs": RUNS}


BENCHMARK = Benchmark(
    name="many",
    unit="run",
    measures="seconds",
    contenders=[Contender("penstock", "many_ours")],
    demands=[],
    limits=[Limit("scheduler growth", 1.1), Limit("triggerer growth", 1.1)],
    make_data=make_data,
    service=local_platform,
    warm_up=0,
    pairs=1,
)

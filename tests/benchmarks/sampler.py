"""Which samples a step trains on: ours at 10^12 tokens, numpy's permutation of 10^8 indices.

A round is what a run pays that resumes: to be ready for the step it goes on from, and 100 steps
of 512 samples. Numpy's permutation has to be made, and to be kept; ours is worked out from the
step. Its whole state, and the most memory that it takes, are beside the rates; it must take no more
at 10^12 tokens than at 10^8.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand


def make_data(_folder: Path) -> dict[str, Any]:
    """Nothing to make: only numbers are shuffled."""
    return {"sequence": 1024, "global_batch": 512, "steps": 100}


BENCHMARK = Benchmark(
    name="sampler",
    unit="samples",
    contenders=[
        Contender("penstock", "sampler_ours", options={"tokens": 10**12}),
        Contender("penstock at 10^8 tokens", "sampler_ours", options={"tokens": 10**8}),
        Contender("numpy at 10^8 samples", "sampler_numpy", "bench", {"samples": 10**8}),
    ],
    demands=[
        Demand(over="numpy at 10^8 samples", ratio=1),
        Demand(over="penstock at 10^8 tokens", ratio=0.5),
    ],
    make_data=make_data,
)

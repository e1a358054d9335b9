"""gate: the decision over 100,000 documents and 10,000 resamples, in at most 5 s on one core.

All of it is timed, from two tables of scores to the verdict: the bounds of the improvement, and of
the improvement on each of 24 slices. Beside it scipy's paired bootstrap, which has the improvement
alone to resample, a hundredth as often, and in batches that fit into memory.

Penstock's figures also hold the gate's power and errors on simulated models, as docs/models.md has
them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.harness import Benchmark, Contender, Demand, Limit

DOCUMENTS = 100_000
RESAMPLES = 10_000


def make_data(folder: Path) -> dict[str, Any]:
    """Scores of a champion and of a candidate that is slightly better on most documents."""
    random = np.random.default_rng(6)
    sizes = np.maximum(40, np.exp(random.normal(8, 1.3, DOCUMENTS))).astype(np.int64)
    champion = sizes * np.exp(random.normal(0, 0.3, DOCUMENTS))
    candidate = champion * (0.99 + 0.03 * random.standard_t(4, DOCUMENTS))
    documents = {"doc_id": [f"{number:064x}" for number in range(DOCUMENTS)], "bytes": sizes}
    slices = {
        "source": [f"source-{number}" for number in random.integers(0, 14, DOCUMENTS)],
        "language": random.choice(
            ["en", "ko", "de", "fr", "zh"], DOCUMENTS, p=[0.6, 0.2, 0.1, 0.05, 0.05]
        ),
        "length": [f"{size.bit_length() // 3}" for size in sizes.tolist()],
    }
    pq.write_table(pa.table({**documents, "nats": candidate, **slices}), folder / "ours.parquet")
    pq.write_table(pa.table({**documents, "nats": champion}), folder / "theirs.parquet")
    return {"resamples": RESAMPLES}


BENCHMARK = Benchmark(
    name="gate",
    unit="resamples",
    contenders=[
        Contender("penstock", "gate_ours"),
        Contender("scipy", "gate_scipy", options={"resamples": RESAMPLES // 100}),
    ],
    demands=[Demand(over="scipy", ratio=3)],
    make_data=make_data,
    limits=[Limit("seconds a decision", 5.0)],
)

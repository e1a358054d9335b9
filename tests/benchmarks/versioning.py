"""versioning: is a tree of 2 GB still what its newest version holds? Ours against `md5sum`.

Both read every byte: neither a time nor a size is believed. Ours then also compares the tree with
its record, looks whether the store has each object, and finds that no new version is to be made.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.harness import Benchmark, Contender, Demand

SHARDS = 20
SHARD_BYTES = 100_000_000  # as 50 million tokens of 2 bytes
SMALL_FILES = 200


def make_data(folder: Path) -> dict[str, Any]:
    """Write `tree/`: token shards, and small files beside them."""
    generator = np.random.default_rng(20_241_121)
    tree = folder / "tree"
    (tree / "tokens").mkdir(parents=True)
    (tree / "documents").mkdir()
    for number in range(SHARDS):
        content = generator.bytes(SHARD_BYTES)
        (tree / "tokens" / f"train-{number:05}.bin").write_bytes(content)
    for number in range(SMALL_FILES):
        (tree / "documents" / f"part-{number:05}.parquet").write_bytes(generator.bytes(10_000))
    return {}


BENCHMARK = Benchmark(
    name="versioning",
    unit="bytes",
    contenders=[Contender("penstock", "versioning_ours"), Contender("md5sum", "versioning_md5sum")],
    demands=[Demand(over="md5sum", ratio=0.5)],
    make_data=make_data,
)

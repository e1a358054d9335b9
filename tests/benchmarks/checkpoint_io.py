"""Bytes between device and drive: a checkpoint restored by each reader, and one saved.

`drive` moves as many bytes with O_DIRECT between the drive and host memory and does nothing with
them: reads with eight threads, writes one after the other and synced, as ours are. A checkpoint's
bytes are checked and copied besides. The page cache is emptied of the files before each round.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.page_cache import empty_cache

SHAPE = {
    "layers": 8,
    "width": 768,
    "heads": 12,
    "kv_heads": 12,
    "hidden": 2048,
    "vocab_size": 8192,
    "context_length": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "restore mmap": {"reader": "mmap"},
    "restore pinned": {"reader": "pinned"},
    "restore gds": {"reader": "gds"},  # on a CPU, or where GDS can't be had, pinned
    "save": {"reader": None},
}


def make_data(folder: Path) -> dict[str, Any]:
    """A checkpoint of 0.8 GB."""
    from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
    from pipelines.training.checkpoint.store import CheckpointStore
    from tests.benchmarks.contenders.small_training import Training

    training = Training({"shape": SHAPE})
    training.step()
    store = CheckpointStore(folder / "checkpoints")
    with Checkpoints(store, training.model, training.optimizer) as checkpoints:
        checkpoints.save(Position(1))
    (file,) = (folder / "checkpoints").rglob("*.distcp")
    size = file.stat().st_size // 4096 * 4096
    return {"shape": SHAPE, "file": str(file.relative_to(folder)), "bytes": size}


BENCHMARK = Benchmark(
    name="checkpoint_io",
    unit="bytes",
    contenders=[
        Contender("penstock", "checkpoint_io_ours"),
        Contender("drive", "checkpoint_io_drive"),
    ],
    demands=[
        Demand(over="drive", ratio=0.8, case="restore pinned"),
        Demand(over="drive", ratio=0.8, case="save"),
    ],
    make_data=make_data,
    cases=CASES,
    before_round=empty_cache,
)

"""How long training stands still for a checkpoint: ours, and `torch.save` of the same state.

Each round trains a few steps and saves weights and AdamW's moments once, to a folder. Of ours the
time counts that the training thread spends in the save and in the wait before the next update;
what the copy and the write cost the step that runs beside them is told as its time.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand

SHAPE = {
    "layers": 6,
    "width": 384,
    "heads": 6,
    "kv_heads": 6,
    "hidden": 1024,
    "vocab_size": 4096,
    "context_length": 128,
}


def make_data(_folder: Path) -> dict[str, Any]:
    """Nothing but the shapes: some 150 MB of weights and moments."""
    return {"shape": SHAPE, "batch": 4}


BENCHMARK = Benchmark(
    name="checkpoint",
    unit="saves",
    contenders=[
        Contender("penstock", "checkpoint_ours"),
        Contender("torch_save", "checkpoint_torch"),
    ],
    demands=[Demand(over="torch_save", ratio=10)],
    make_data=make_data,
)

"""Training one small mixture of experts on the CPU with two threads: tokens a second.

As `train`, with Mixtral's kind of layers: eight experts, of which each token has two. Penstock also
balances its routers by two losses, Hugging Face's Trainer by none, as it comes.
"""

from pathlib import Path
from typing import Any

from pipelines.models.families import flags
from tests.benchmarks import train
from tests.benchmarks.harness import Benchmark, Contender, Demand

SHAPE = (
    train.SHAPE
    | flags("mixtral")
    | {"kv_heads": 4, "hidden": 344, "experts": 8, "experts_per_token": 2}
)


def make_data(folder: Path) -> dict[str, Any]:
    """Random ids."""
    return train.make_data(folder) | {"shape": SHAPE}


BENCHMARK = Benchmark(
    name="moe",
    unit="tokens",
    contenders=[
        Contender("penstock", "train_ours", options={"name": "compiled", "compile": True}),
        Contender("penstock eager", "train_ours", options={"name": "eager", "compile": False}),
        Contender("hf trainer", "train_huggingface", options={"compile": False}),
    ],
    demands=[
        Demand(over="hf trainer", ratio=1.3),
        Demand(of="penstock eager", over="hf trainer", ratio=1.0),
    ],
    make_data=make_data,
)

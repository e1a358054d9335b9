"""Training one small mixture of experts on the CPU with two threads: tokens a second.

As `train`, with Mixtral's kind of layers: eight experts, of which each token has two. Penstock also
balances its routers by two losses, Hugging Face's Trainer by none, as it comes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.models.families import flags
from tests.benchmarks import train

SHAPE = (
    train.SHAPE
    | flags("mixtral")
    | {"kv_heads": 4, "hidden": 344, "experts": 8, "experts_per_token": 2}
)
WITHOUT = "hf trainer compiled"


def make_data(folder: Path) -> dict[str, Any]:
    """Random ids."""
    return train.make_data(folder) | {"shape": SHAPE}


BENCHMARK = replace(
    train.BENCHMARK,
    name="moe",
    contenders=[each for each in train.BENCHMARK.contenders if each.name != WITHOUT],
    demands=[each for each in train.BENCHMARK.demands if each.over != WITHOUT],
    make_data=make_data,
)

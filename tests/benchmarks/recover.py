"""A train worker is killed: how long until training goes on, and the cold start of the same job.

Both are jobs of two workers on a warm platform's Ray. `penstock` counts from the kill -9 of one to
the next step's line in the progress file, from the last checkpoint on; `cold start` from the
driver's start to the first step's line.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import write_text
from pipelines.recipe.recipe_files import dump_yaml, override_values, parse_recipe
from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.local_platform import local_platform
from tests.benchmarks.startup import RECIPE


def make_data(folder: Path) -> dict[str, Any]:
    """The recipe of `startup`, with steps enough for a kill among them."""
    train = {"train.steps": 1_000_000, "train.checkpoint_every": 20}
    recipe = override_values(parse_recipe(RECIPE), train)
    write_text(folder / "recipe.yaml", dump_yaml(recipe))
    return {}


BENCHMARK = Benchmark(
    name="recover",
    unit="start",
    measures="seconds",
    contenders=[
        Contender("penstock", "recover_job", options={"kill": True}),
        Contender("cold start", "recover_job", options={"kill": False}),
    ],
    demands=[Demand(over="cold start", ratio=0.6)],
    make_data=make_data,
    service=local_platform,
)

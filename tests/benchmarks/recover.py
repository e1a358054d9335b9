"""A train worker is killed: how long until training goes on, and two starts of the same job.

All are jobs of two workers on a warm platform's Ray. `penstock` counts from the kill -9 of one to
the next step's line in the progress file, from the last checkpoint on; both starts count from the
driver's start to the first step's line. In a `warm start` the workers are forks of a process that
has imported what they need, as they are in `penstock`; in a `cold start` there is no such process.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import write_text
from pipelines.recipe.recipe_files import dump_yaml, override_values, parse_recipe
from tests.benchmarks.harness import Benchmark, Contender, Demand, Limit
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
        Contender("penstock", "recover_job", options={"kill": True, "warm": True}),
        Contender("warm start", "recover_job", options={"kill": False, "warm": True}),
        Contender("cold start", "recover_job", options={"kill": False, "warm": False}),
    ],
    demands=[Demand(over="cold start", ratio=0.6)],
    limits=[Limit("median", 10.0)],
    make_data=make_data,
    service=local_platform,
)

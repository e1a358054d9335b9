"""From queued to the first optimizer step: the train task on a warm platform, and `torchrun`.

`penstock` is a run of `llm_pipeline` whose data come out of the stage cache and whose training does
not: the time counts from Airflow's queueing of the task *train* to the first step's line in the
progress file. So the scheduler, the task's process, the look into the stage cache, the Ray job and
its workers are in it. `torchrun` is `torchrun -m pipelines.training` of the same recipe on the same
two processes, from its start to the same line, with its data at hand. Training, evaluation and the
gate then run to their end, untimed, so that the next round finds the machine idle.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import write_text
from pipelines.recipe.recipe_files import dump_yaml, parse_recipe
from tests.benchmarks.harness import Benchmark, Contender, Demand, Limit
from tests.benchmarks.local_platform import local_platform

RECIPE = {
    "name": "startup",
    "data": {
        "source": {"kind": "stdlib", "max_documents": 60},
        "tokenizer": {"kind": "byte"},
        "sequence_length": 64,
        "validation_fraction": 0.2,
    },
    "model": {"preset": "llama-100k"},
    "train": {
        "steps": 4,
        "warmup_steps": 1,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "log_every": 1,
    },
    "evaluate": {"max_bytes": 20_000, "sample_tokens": 1},
    "register": {"model_name": "startup"},
    "resources": {"workers": 2},
}


def make_data(folder: Path) -> dict[str, Any]:
    """The recipe; its data are the standard library's files."""
    write_text(folder / "recipe.yaml", dump_yaml(parse_recipe(RECIPE)))
    return {}


BENCHMARK = Benchmark(
    name="startup",
    unit="start",
    measures="seconds",
    contenders=[Contender("penstock", "startup_ours"), Contender("torchrun", "startup_torchrun")],
    demands=[Demand(over="torchrun", ratio=2)],
    limits=[Limit("median", 14)],
    make_data=make_data,
    service=local_platform,
)

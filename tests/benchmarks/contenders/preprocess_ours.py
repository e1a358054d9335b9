"""Ours: the stage, its tasks on a Ray cluster of two CPUs that set-up starts and warms."""

import os
import shutil
from pathlib import Path
from typing import Any

import ray

from pipelines.recipe.recipe import Recipe
from pipelines.stages.preprocess import preprocessing
from ray_jobs.ray_map import map_on_ray
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    workspace = folder / "ours"
    recipe = Recipe.model_validate(
        {
            "name": "benchmark",
            "data": {
                "source": {"kind": "files", "path": str(folder / "corpus")},
                "filters": {
                    "gopher_quality": {"enabled": True},
                    "gopher_repetition": {"enabled": True},
                },
                "dedup": {
                    "kind": "minhash",
                    **{key: options[key] for key in ("ngram", "permutations", "jaccard")},
                },
                "tokenizer": {"kind": "pretrained", "path": str(folder / "tokenizer")},
            },
        }
    )
    for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(variable, None)  # not the platform's
    ray.init("local", num_cpus=options["workers"], include_dashboard=False, log_to_driver=False)
    list(map_on_ray(str, range(2 * options["workers"])))

    def run_round() -> tuple[float, dict[str, Any]]:
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir()
        record = preprocessing.run(recipe, workspace, map_on_ray)
        documents = record.stats["documents"]
        figures = {"kept": documents["kept"], "tokens": record.stats["tokens"]}
        return options["bytes"] / 1e6, figures | {"dropped": documents["dropped"]}

    return run_round


if __name__ == "__main__":
    serve(prepare)

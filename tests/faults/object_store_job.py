"""All that touches an object store: `python -m tests.faults.object_store_job FOLDER BUCKET ACTION`.

`make`: texts out of S3, a dataset version into it. `train`: its shards streamed back out of S3,
checkpoints into it. `register`: the model into the registry's artifacts in S3, and back out of it.
Prints what came out as JSON; a user's error is its line, and exit code 2.
"""

import json
import sys
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import write_json, write_text
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.run_source import settle
from pipelines.loading.sources.s3_objects import object_path
from pipelines.models.model_folder import fingerprint
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.registry import registry
from pipelines.registry.signing import ensure_key_pair
from pipelines.run.records import PreprocessRecord
from pipelines.run.workspace import Run, read_recipe
from pipelines.stages.evaluate import evaluation
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.register import register_stage
from pipelines.stages.run_tracking import open_tracking
from pipelines.stages.train import train_stage
from pipelines.stages.validate import data_gate
from tests.unit.datasets.dataset_workspace import validate as pass_gate

STEPS = "train.steps=12"


def main(folder: Path, bucket: str, action: str) -> None:
    """`make` the version, `train` on it, or `register` the model."""
    actions = {"make": _make, "train": _train, "register": _register}
    sys.stdout.write(json.dumps(actions[action](folder, bucket)) + "\n")


def _make(folder: Path, _: str) -> dict[str, str]:
    texts = ["data.source.kind=files", "data.source.path=s3://texts", "data.name=texts"]
    recipe = load_recipe("debug", texts)
    workspace = _open(folder / "made", recipe, fingerprint_inputs(recipe.data))
    preprocessing.run(recipe, workspace)
    pass_gate(workspace)
    version = make(workspace)
    shard = PreprocessRecord.read(workspace).dataset.train.shards[0]
    return {
        "version": version.label,
        "data": version.directory_hash,
        "shard": object_path(shard.md5),
    }


def _train(folder: Path, bucket: str) -> dict[str, str]:
    dataset = ["data.source.kind=dataset", "data.source.path=texts", "data.reader=object_store"]
    changes = [STEPS, f"train.checkpoints=s3://{bucket}/checkpoints", "train.checkpoint_every=4"]
    changes.append(f"register.model_name={bucket}")
    recipe, source = settle(load_recipe("debug", [*dataset, *changes]))
    workspace = _open(folder / "trained", recipe, source)
    preprocessing.run(recipe, workspace)
    data_gate.run(recipe, workspace)
    record = train_stage.run(recipe, workspace)
    assert record is not None
    return {"model": record.model_hash}


def _register(folder: Path, bucket: str) -> dict[str, str]:
    workspace = folder / "trained"
    recipe = read_recipe(workspace)
    ensure_key_pair(load_settings().signing_key)
    open_tracking(workspace)
    evaluation.run(recipe, workspace)
    register_stage.run(recipe, workspace)
    return {"registered": fingerprint(registry.download(bucket))}


def _open(folder: Path, recipe: Recipe, source: dict[str, object]) -> Path:
    write_text(folder / "params.yaml", dump_yaml(recipe))
    write_json(folder / "source.json", source)
    write_json(folder / "previous.json", {})
    write_json(folder / "environment.json", {"extensions": {"preprocess": {}}})
    name = f"{folder.parent.name}-{folder.name}"
    Run(dag_run_id=name, git_commit="0" * 40, dirty=False, recipe_fingerprint="0").write(folder)
    return folder


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USER_ERROR)

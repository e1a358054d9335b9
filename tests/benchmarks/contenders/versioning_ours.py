"""Ours: make a version of a workspace whose data its newest version holds already."""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.storage import write_json, write_text
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.dvc_objects import hash_folder
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import (
    DatasetRef,
    PreprocessRecord,
    Split,
    ValidateRecord,
    output_folder,
)
from pipelines.run.workspace import Run
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    os.environ["PENSTOCK_HOME"] = str(folder / "home")
    workspace = _workspace(folder / "workspace", folder / "tree")
    version = make(workspace)

    def run_round() -> float:
        assert make(workspace) == version
        return version.bytes

    return run_round


def _workspace(folder: Path, tree: Path) -> Path:
    """What the data gate leaves of the tree; its files are links to the tree's."""
    shutil.rmtree(folder, ignore_errors=True)
    output = output_folder(folder, PreprocessRecord.stage)
    shutil.copytree(tree, output, copy_function=os.link)
    nothing = Split(documents=0, bytes=0, tokens=0, shards=())
    dataset = DatasetRef(vocab_size=257, train=nothing, validation=nothing)
    PreprocessRecord(dataset=dataset, stats={}).write(folder)
    ValidateRecord(expectations=1, data_docs="index.html").write(folder)
    write_text(folder / "params.yaml", dump_yaml(load_recipe("debug")))
    write_json(folder / "source.json", {"source": {}, "tokenizer": None})
    Run(dag_run_id="bench", git_commit="0" * 40, dirty=False, recipe_fingerprint="0").write(folder)
    passed = {"path": "outputs/preprocess", "md5": hash_folder(output).hash}
    write_text(folder / "dvc.lock", yaml.safe_dump({"stages": {"validate": {"deps": [passed]}}}))
    return folder


if __name__ == "__main__":
    serve(prepare)

"""Making a dataset version: its files are pushed, then its commit and its tag, which is the last.

Until the tag is there, nothing looks like a version: a maker that is killed leaves objects and
perhaps a commit that nobody refers to.
"""

import hashlib
import json
import random
import re
import time
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.core.storage import read_json
from pipelines.datasets.dvc_objects import ObjectStore, Tree, hash_folder
from pipelines.datasets.versions import VERSION_FILE, DatasetVersion, open_repository, read_versions
from pipelines.recipe.data_section import DATASET_NAME
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import DatasetRef, PreprocessRecord, ValidateRecord, output_folder
from pipelines.run.workspace import Run, read_recipe

_PATIENCE_S = 120.0  # while other makers are quicker
_DVC_FILE = """outs:
- md5: {hash}
  size: {size}
  nfiles: {files}
  hash: md5
  path: data
"""


def dataset_name(recipe: Recipe) -> str:
    """`data.name`, else the recipe's own name in lower case.

    Raises:
        UserError: the recipe's name can't be a dataset's.
    """
    name = recipe.data.name or recipe.name.lower()
    if not re.fullmatch(DATASET_NAME, name):
        raise UserError(f"{name!r} can't be the name of a dataset; set data.name to a-z, 0-9, `-`")
    return name


def source_summary(source: dict[str, Any]) -> dict[str, Any]:
    """Return a workspace's `source.json` in short: its hash changes with any byte of any input."""
    text = json.dumps(source, sort_keys=True)
    inputs = source.get("source", {}).get("inputs", [])
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "files": len(inputs),
        "bytes": sum(found.get("bytes", 0) for found in inputs),
    }


def make(workspace: Path) -> DatasetVersion:
    """Publish what *preprocess* wrote and *validate* passed in a workspace.

    Returns:
        The new version; the newest one where that has the same content.

    Raises:
        UserError: the workspace's data did not pass the gate as they are now, or come out of a
            version themselves.
    """
    settings = load_settings()
    tree = hash_folder(output_folder(workspace, PreprocessRecord.stage))
    dataset = PreprocessRecord.read(workspace).dataset
    _check(workspace, tree, dataset)
    store = ObjectStore(settings.datasets_remote)
    store.push(tree)
    repository = open_repository(settings)
    name = dataset_name(read_recipe(workspace))
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        newest = next(iter(read_versions(repository, repository.tags(name)[-1:])), None)
        if newest and newest.directory_hash == tree.hash:
            return newest
        version = _describe(workspace, tree, dataset, name, newest.version + 1 if newest else 1)
        tag = repository.publish(name, version.version, _files(version, settings))
        if tag:
            made = {"git_revision": tag.commit, "created": tag.created}
            return version.model_copy(update=made)
        time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 (so that makers don't stay in step)
        repository.refresh()
    raise UserError(
        f"{repository.url}: took no version of {name} for {_PATIENCE_S:.0f} s, as others are made "
        "all the time or its server refuses the push of main or of tags"
    )


def _check(workspace: Path, tree: Tree, dataset: DatasetRef) -> None:
    """What is published is, byte for byte, what the data gate saw."""
    if dataset.mixture:
        raise UserError(f"the data are of versions already, {dataset.label}; publish what is new")
    if dataset.name is not None:
        raise UserError(f"the data are {dataset.label}, which is a version already")
    if _validated(workspace) != tree.hash:
        raise UserError(
            f"{output_folder(workspace, PreprocessRecord.stage)} is not what `validate` passed; "
            "run validate again"
        )
    contents = {file.path: file.oid for file in tree.files}
    for shard in (*dataset.train.shards, *dataset.validation.shards):
        if contents.get(shard.path) != shard.md5:
            raise UserError(f"{shard.path} is not what its record says; run preprocess again")


def _validated(workspace: Path) -> str | None:
    """Return the hash of the data that *validate* passed last, from the ledger of the workspace."""
    path = workspace / "dvc.lock"
    stages = read_yaml(path)["stages"] if path.is_file() else {}
    deps = stages.get(ValidateRecord.stage, {}).get("deps", [])
    data = output_folder(Path(), PreprocessRecord.stage).as_posix()
    return next((dep["md5"] for dep in deps if dep["path"] == data), None)


def _describe(
    workspace: Path, tree: Tree, dataset: DatasetRef, name: str, version: int
) -> DatasetVersion:
    run = Run.read(workspace)
    return DatasetVersion(
        name=name,
        version=version,
        directory_hash=tree.hash,
        bytes=tree.bytes,
        files=len(tree.files),
        dataset=dataset,
        stats=PreprocessRecord.read(workspace).stats,
        recipe=read_recipe(workspace).to_dict(),
        source=source_summary(read_json(workspace / "source.json")),
        extensions=read_json(workspace / "environment.json")["extensions"][PreprocessRecord.stage],
        validation=ValidateRecord.read(workspace).model_dump(mode="json"),
        run=run.model_dump(include={"dag_run_id", "git_commit", "dirty"}),
    )


def _files(version: DatasetVersion, settings: Settings) -> dict[str, bytes]:
    """Return the files of a version's commit, which `git clone` and `dvc pull` need."""
    record = version.model_dump(mode="json", exclude={"git_revision", "created"})
    pointer = _DVC_FILE.format(hash=version.directory_hash, size=version.bytes, files=version.files)
    config = (
        f"[core]\n    remote = store\n['remote \"store\"']\n    url = {settings.datasets_remote}\n"
    )
    return {
        ".dvc/config": config.encode(),
        ".dvc/.gitignore": b"/config.local\n/tmp\n/cache\n",
        f"{version.name}/.gitignore": b"/data\n",
        f"{version.name}/data.dvc": pointer.encode(),
        f"{version.name}/{VERSION_FILE}": (
            json.dumps(record, indent=1, sort_keys=True) + "\n"
        ).encode(),
    }

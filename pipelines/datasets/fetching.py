"""*preprocess* of a run whose data are dataset versions: nothing is made, all is fetched."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json
from pipelines.datasets.mixture import (
    TOKENIZER,
    Weighted,
    add_statistics,
    describe_mixture,
    find_mixture,
)
from pipelines.datasets.versions import STREAMED, DatasetVersion, fetch, find
from pipelines.recipe.recipe import Recipe
from pipelines.run.progress import ProgressWriter
from pipelines.run.records import DATASETS, PreprocessRecord, output_folder


def fetch_dataset(recipe: Recipe, workspace: Path) -> PreprocessRecord:
    """Fill `outputs/preprocess` with a version's files, or with those of each of a mixture, without
    the token shards where they are streamed.

    Raises:
        UserError: an object is missing or damaged, or a version is another than when the run
            began.
    """
    source = recipe.data.source
    if source.kind == "mixture":
        return _fetch_mixture(find_mixture(source), recipe, workspace)
    version = find(str(source.path))
    folder = _open_output([version], workspace)
    return _fetch(version, folder, recipe, workspace)


def _fetch_mixture(mixed: Sequence[Weighted], recipe: Recipe, workspace: Path) -> PreprocessRecord:
    folder = _open_output([version for version, _ in mixed], workspace)
    records = [
        _fetch(version, folder / DATASETS / version.label, recipe, workspace)
        for version, _ in mixed
    ]
    dataset = describe_mixture(mixed, [record.dataset for record in records])
    shutil.copytree(folder / dataset.mixture[0].folder / TOKENIZER, folder / TOKENIZER)
    return PreprocessRecord(dataset=dataset, stats=add_statistics(records)).write(workspace)


def _open_output(versions: Sequence[DatasetVersion], workspace: Path) -> Path:
    """Return the stage's folder, empty; the versions must be those that `source.json` names."""
    path = workspace / "source.json"
    if path.is_file():
        facts = read_json(path)
        begun = {each["dataset"]: each["directory_hash"] for each in facts.get("mixture", [facts])}
        for version in versions:
            if begun.get(version.label) != version.directory_hash:
                raise UserError(
                    f"{version.label} is another than when this run began; start a new run"
                )
    folder = output_folder(workspace, PreprocessRecord.stage)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _fetch(
    version: DatasetVersion, folder: Path, recipe: Recipe, workspace: Path
) -> PreprocessRecord:
    progress = ProgressWriter(workspace, PreprocessRecord.stage)
    return fetch(
        version,
        folder,
        token_shards=recipe.data.reader != STREAMED,
        on_file=lambda done, total: progress.write(
            done, total, f"files of {version.label} fetched", force=done == total
        ),
    )

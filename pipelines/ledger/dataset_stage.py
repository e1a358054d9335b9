"""*preprocess* of a run whose data are a dataset version: nothing is made, all is fetched."""

import shutil
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.progress import ProgressWriter
from pipelines.core.recipe import Recipe
from pipelines.core.records import PreprocessRecord, output_folder
from pipelines.core.storage import read_json
from pipelines.ledger.datasets import STREAMED, fetch, find


def fetch_dataset(recipe: Recipe, workspace: Path) -> PreprocessRecord:
    """Fill `outputs/preprocess` with a version's files, without the token shards where they are
    streamed.

    Raises:
        UserError: an object is missing or damaged, or the version is another than when the run
            began.
    """
    version = find(str(recipe.data.source.path))
    path = workspace / "source.json"
    if path.is_file() and read_json(path).get("directory_hash") != version.directory_hash:
        raise UserError(f"{version.label} is another than when this run began; start a new run")
    folder = output_folder(workspace, PreprocessRecord.stage)
    shutil.rmtree(folder, ignore_errors=True)
    progress = ProgressWriter(workspace, PreprocessRecord.stage)
    return fetch(
        version,
        folder,
        token_shards=recipe.data.reader != STREAMED,
        on_file=lambda done, total: progress.write(
            done, total, "files fetched", force=done == total
        ),
    )

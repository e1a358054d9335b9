"""A training job from a command line, without Airflow: its recipe, and its own workspace.

The workspace is named after everything that decides the result. So a job that was stopped continues
as the same run when it is started again, and a job that had ended begins again.
"""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pipelines.core.product import PRODUCT, PRODUCT_FILES
from pipelines.core.settings import DEFAULT_RECIPE, load_settings
from pipelines.core.storage import one_at_a_time, write_json, write_text
from pipelines.datasets.run_source import settle
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml, load_recipe, with_absolute_paths
from pipelines.registry.parents import name_versions, with_folders
from pipelines.run.records import RUN_FILE, PreprocessRecord, TrainRecord, record_path
from pipelines.run.workspace import Run
from pipelines.stage_cache.fingerprint import fingerprints
from pipelines.stages.stage_process import STAGE_LOCK
from pipelines.stages.train.layout_file import LAYOUT
from pipelines.training.checkpoint.store import CheckpointStore, checkpoint_places
from pipelines.training.recipe_check import check_recipe


class Job(NamedTuple):
    """The job that a command line asks for."""

    recipe: Recipe
    workspace: Path | None  # if None, a folder named after the job


def parse_job(program: str, arguments: Sequence[str], overrides: Sequence[str] = ()) -> Job:
    """Return the job that a command line asks for.

    Args:
        program: The program's name, for `--help`.
        arguments: The arguments without the program's name.
        overrides: Values as for `--set`, which override those.

    Raises:
        UserError: The recipe is not valid, or the engine can't run it.
    """
    parser = argparse.ArgumentParser(prog=program, description="Train a recipe.")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="a shipped recipe, or a file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="may be repeated"
    )
    parser.add_argument("--workspace", type=Path, help="a folder that all processes share")
    options = parser.parse_args(arguments)
    recipe = load_recipe(options.recipe, [*options.set, *overrides])
    recipe = with_folders(name_versions(with_absolute_paths(recipe, Path.cwd())))
    check_recipe(recipe)
    workspace = options.workspace
    return Job(recipe, workspace and workspace.absolute())


@contextmanager
def open_workspace(job: Job) -> Iterator[Path]:
    """Hold the workspace of this recipe and source; the same job elsewhere waits for its end."""
    recipe = job.recipe
    _, source = settle(recipe)
    codes = fingerprints(PRODUCT, PRODUCT_FILES)
    code = [codes[stage] for stage in (PreprocessRecord.stage, TrainRecord.stage)]
    identity = f"{recipe.fingerprint()} {source} {code}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    workspace = job.workspace or load_settings().runs / f"ad-hoc-{recipe.name}-{key}"
    workspace.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(workspace / STAGE_LOCK):
        ended = record_path(workspace, TrainRecord.stage).is_file()
        if ended:
            _forget(recipe, workspace)
        write_text(workspace / "params.yaml", dump_yaml(recipe))
        write_json(workspace / "source.json", source)
        if ended or not _goes_on(recipe, workspace):
            _begin(recipe, workspace)
        yield workspace


def _goes_on(recipe: Recipe, workspace: Path) -> bool:
    """Return whether the workspace has a run of this recipe, which then continues in MLflow too."""
    if not (workspace / RUN_FILE).is_file():
        return False
    return Run.read(workspace).recipe_fingerprint == recipe.fingerprint()


def _begin(recipe: Recipe, workspace: Path) -> None:
    Run(
        dag_run_id=f"{workspace.name}-{datetime.now(UTC):%Y%m%dT%H%M%S}",
        git_commit="",  # an uploaded folder has no git
        dirty=False,
        recipe_fingerprint=recipe.fingerprint(),
    ).write(workspace)


def _forget(recipe: Recipe, workspace: Path) -> None:
    """Remove what a run would go on from: the machine may be another, with another precision."""
    (workspace / LAYOUT).unlink(missing_ok=True)
    for place in checkpoint_places(recipe, workspace):
        CheckpointStore(place).clear()

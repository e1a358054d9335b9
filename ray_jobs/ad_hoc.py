"""A training job without Airflow: its own workspace, preprocess where missing, its own MLflow run.

The workspace is named after what decides the result, so the same job again goes on where it was
stopped, and begins anew where it had ended.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.log import set_up_logging
from pipelines.core.recipe import Recipe
from pipelines.core.recipe_files import dump_yaml, load_recipe, with_absolute_paths
from pipelines.core.records import record_path
from pipelines.core.settings import DEFAULT_RECIPE, PROJECT, load_settings
from pipelines.core.storage import write_json, write_text
from pipelines.data.reading.fingerprint import fingerprint_inputs
from pipelines.ledger.workspace import Run
from pipelines.stages import preprocess, train
from pipelines.stages.run_tracking import close_tracking, open_tracking
from pipelines.stages.runner import only_one
from pipelines.training.checkpoint_store import CheckpointStore
from pipelines.training.supported import supported
from ray_jobs.ray_map import map_on_ray
from ray_jobs.train import STAGE, train_on_ray


def train_ad_hoc(arguments: Sequence[str]) -> None:
    """Train a recipe; exits with 2 and one line where a person is to blame."""
    set_up_logging()
    try:
        recipe = _parse(arguments)
        workspace = _open(recipe)
        print(f"workspace {workspace}\nMLflow run {open_tracking(workspace)}")  # noqa: T201
        status = "FAILED"
        try:
            _run(recipe, workspace)
            status = "FINISHED"
        finally:
            close_tracking(workspace, status)
    except UserError as error:
        sys.stderr.write(f"{STAGE}: {error}\n")
        sys.exit(EXIT_USER_ERROR)


def _parse(arguments: Sequence[str]) -> Recipe:
    parser = argparse.ArgumentParser(prog="python -m ray_jobs.train", description=__doc__)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="a shipped one's name or a file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="may be repeated"
    )
    options = parser.parse_args(arguments)
    recipe = with_absolute_paths(load_recipe(options.recipe, options.set), Path.cwd())
    supported(recipe)
    return recipe


def _open(recipe: Recipe) -> Path:
    """The workspace of this recipe on this source."""
    source = fingerprint_inputs(recipe.data)
    identity = f"{recipe.fingerprint()} {source} {_code_hash()}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    workspace = load_settings().runs / f"ad-hoc-{recipe.name}-{key}"
    if record_path(workspace, STAGE).is_file():
        CheckpointStore(train.checkpoints_of(recipe, workspace)).clear()
    write_text(workspace / "params.yaml", dump_yaml(recipe))
    write_json(workspace / "source.json", source)
    Run(
        dag_run_id=f"{workspace.name}-{datetime.now(UTC):%Y%m%dT%H%M%S}",
        git_commit="",  # an uploaded folder has no git
        dirty=False,
        recipe_fingerprint=recipe.fingerprint(),
    ).write(workspace)
    return workspace


def _code_hash() -> str:
    """Of the code and the lock that were uploaded with the job."""
    digest = hashlib.sha256()
    code = (
        path for folder in ("pipelines", "ray_jobs") for path in (PROJECT / folder).rglob("*.py")
    )
    for path in (*sorted(code), PROJECT / "requirements.lock"):
        digest.update(path.relative_to(PROJECT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _run(recipe: Recipe, workspace: Path) -> None:
    import ray

    ray.init(ignore_reinit_error=True)
    os.chdir(workspace)
    with only_one(workspace):
        if not record_path(workspace, preprocess.STAGE).is_file():
            preprocess.run(recipe, workspace, map_on_ray)
        train_on_ray(recipe, workspace)

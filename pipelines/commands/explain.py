"""`penstock explain`, and what `penstock run --explain` tells."""

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT, load_settings
from pipelines.run.records import RUN_FILE

if TYPE_CHECKING:
    from pipelines.recipe.recipe import Recipe


def explain(run: Annotated[str, typer.Argument(help="The id of a run.", metavar="RUN")]) -> None:
    """Say which stages of a run ran and why, and which came from the stage cache.

    Why is told against the newest earlier run: the function that changed with its diff, the
    parameter with both values, the file, the package.
    """
    from pipelines.run.workspace import workspace_path
    from pipelines.stage_cache.explanation import explain_past

    runs = load_settings().runs
    workspace = workspace_path(runs, run)
    if not (workspace / RUN_FILE).is_file():
        raise UserError(f"no run is named {run!r} below {runs}; `penstock status` names some")
    for forecast in explain_past(workspace, runs):
        for line in forecast.lines():
            typer.echo(line)


def explain_beforehand(recipe: "Recipe", kept: Mapping[str, Any] | None = None) -> None:
    """Print what a run of the recipe would do, and why; nothing runs."""
    from pipelines.datasets.run_source import settle
    from pipelines.orchestration.cluster_plan import plan_on_cluster
    from pipelines.run.workspace import workspace_path
    from pipelines.stage_cache.explanation import explain, keep
    from pipelines.stage_cache.open_workspace import open_workspace

    settings = load_settings()
    recipe, source = settle(recipe)
    planned = plan_on_cluster(settings, recipe, source)
    run_id = f"explain-{uuid4().hex[:12]}"
    try:
        workspace = open_workspace(PROJECT, settings.home, run_id, recipe, source)
        if kept:
            keep(workspace, settings.runs, **kept)
        for forecast in explain(workspace, settings.runs, planned):
            for line in forecast.lines():
                typer.echo(line)
    finally:
        shutil.rmtree(workspace_path(settings.runs, run_id), ignore_errors=True)

"""`penstock run`, `penstock stage` and `penstock explain`."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from pipelines.commands.options import Json, Overrides, RecipeName, who
from pipelines.core.errors import UserError
from pipelines.core.settings import DEFAULT_RECIPE, PROJECT, load_settings

if TYPE_CHECKING:
    from pipelines.platform.dag_runs import Summary
    from pipelines.recipe.recipe import Recipe


def run(
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE", help="Use its last result even if its key changed; repeatable."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="Why --keep, for the lineage.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Only tell which stages would run, and why.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run to its end.")] = True,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline through Airflow's scheduler and follow it.

    For your own text: penstock run --set data.source.kind=files --set data.source.path=FILE

    The exit code is 0 if the run succeeds, even if the model is refused; 2 if the recipe or the
    data is wrong; 1 for every other failure.
    """
    from pipelines.commands.display import print_summary, show_progress
    from pipelines.platform import dag_runs
    from pipelines.platform.airflow_api import AirflowApi

    settings = load_settings()
    resolved = _resolve(recipe, overrides or [])
    if keep and not why:
        raise UserError(
            '--keep needs a reason, which the model\'s lineage will record: --why "..."'
        )
    kept = {"names": keep, "who": who(), "why": why} if keep else None
    if explain:
        explain_beforehand(resolved, kept)
        return
    airflow = AirflowApi(settings)
    if dag_runs.make_ready(airflow):
        typer.echo(
            "llm_pipeline is no longer paused: it also runs for each dataset version that "
            "data_refresh makes and no recipe waits for",
            err=True,
        )
    run_id = dag_runs.start(airflow, resolved, kept)
    if not wait:
        typer.echo(json.dumps({"dag_run_id": run_id}) if as_json else run_id)
        return
    typer.echo(f"run {run_id}", err=as_json)
    run_page = dag_runs.page(settings, run_id)
    show_progress(dag_runs.follow(airflow, settings, run_id), run_page, to_stderr=as_json)
    summary = dag_runs.summarize(airflow, settings, run_id)
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), indent=2))
    if summary.state != "success":
        raise _failure(summary)
    if not as_json:
        print_summary(summary, settings)


def stage(
    name: Annotated[str, typer.Argument(help="preprocess, validate, train, evaluate, register")],
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Overrides = None,
) -> None:
    """Run one stage here, in one process, without Airflow or Ray.

    The results of earlier stages come from the stage cache; this stage's result goes into it.
    """
    from pipelines.platform.dag_runs import run_foreground
    from pipelines.stages.stage import find_stage

    found = find_stage(name)
    workspace, code = run_foreground(found, _resolve(recipe, overrides or []), load_settings())
    if code == 0:
        typer.echo(str(workspace / "outputs" / name))
    raise typer.Exit(code)


def _resolve(name: str, overrides: list[str]) -> "Recipe":
    from pipelines.data.reading.sources import list_inputs
    from pipelines.datasets.run_source import settle
    from pipelines.recipe.recipe_files import load_recipe, with_absolute_paths
    from pipelines.registry.parents import name_versions, with_folders
    from pipelines.training.recipe_check import check_recipe

    recipe = with_absolute_paths(load_recipe(name, overrides), Path.cwd())
    if recipe.data.source.is_published:
        recipe, _ = settle(recipe)
    else:
        list_inputs(recipe.data.source)  # report a missing path now, not from a task
    recipe = name_versions(recipe)
    check_recipe(with_folders(recipe))
    return recipe


def _failure(summary: "Summary") -> Exception:
    from pipelines.platform.dag_runs import page

    if summary.error:
        return UserError(summary.error)
    failed = [name for name, stage in summary.stages.items() if stage.state == "failed"]
    typer.echo(
        f"error: {failed[0] if failed else 'prepare'} failed; its log: "
        f"{page(load_settings(), summary.dag_run_id)}",
        err=True,
    )
    return typer.Exit(1)


def explain(run: Annotated[str, typer.Argument(help="The id of a run.", metavar="RUN")]) -> None:
    """Tell which stages of a run ran and why, and which came from the stage cache.

    The reason is the difference from the newest earlier run: the changed function with its diff,
    the parameter with both values, the file or the package.
    """
    from pipelines.run.workspace import find_workspace
    from pipelines.stage_cache.explanation import explain_past

    runs = load_settings().runs
    for forecast in explain_past(find_workspace(runs, run), runs):
        for line in forecast.lines():
            typer.echo(line)


def explain_beforehand(recipe: "Recipe", kept: Mapping[str, Any] | None = None) -> None:
    """Print what a run of the recipe would do, and why, without running anything."""
    from pipelines.orchestration.cluster_plan import plan_on_cluster, settle_on_cluster
    from pipelines.registry.parents import settle_run
    from pipelines.run.workspace import workspace_path
    from pipelines.stage_cache.explanation import explain, keep
    from pipelines.stage_cache.open_workspace import open_workspace

    settings = load_settings()
    run = settle_on_cluster(settings, settle_run(recipe))
    planned = plan_on_cluster(settings, run.ready, run.source)
    run_id = f"explain-{uuid4().hex[:12]}"
    try:
        workspace = open_workspace(
            PROJECT, settings.home, run_id, run.recipe, run.source, ready=run.ready
        )
        if kept:
            keep(workspace, settings.runs, **kept)
        for forecast in explain(workspace, settings.runs, planned):
            for line in forecast.lines():
                typer.echo(line)
    finally:
        shutil.rmtree(workspace_path(settings.runs, run_id), ignore_errors=True)

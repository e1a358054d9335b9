"""`penstock run` and `penstock stage`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.explain import explain_beforehand
from pipelines.commands.options import Json, Overrides, RecipeName, who
from pipelines.core.errors import UserError
from pipelines.core.settings import DEFAULT_RECIPE, load_settings

if TYPE_CHECKING:
    from pipelines.platform.dag_runs import Summary
    from pipelines.recipe.recipe import Recipe


def run(
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE", help="Take its last result although its key changed; repeatable."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="Of --keep, for the lineage.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Only say which stages would run, and why.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run to its end.")] = True,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline through Airflow's scheduler and follow it.

    Your own text: penstock run --set data.source.kind=files --set data.source.path=FILE

    Exit code 0 where the run succeeded, a refused model included; 2 where the recipe or the data
    is wrong; 1 for everything else.
    """
    from pipelines.commands.display import print_summary, show_progress
    from pipelines.platform import dag_runs
    from pipelines.platform.airflow_api import AirflowApi

    settings = load_settings()
    resolved = _resolve(recipe, overrides or [])
    if keep and not why:
        raise UserError(
            '--keep needs the reason, which the model\'s lineage will have: --why "..."'
        )
    kept = {"names": keep, "who": who(), "why": why} if keep else None
    if explain:
        explain_beforehand(resolved, kept)
        return
    airflow = AirflowApi(settings)
    if dag_runs.make_ready(airflow):
        typer.echo(
            "llm_pipeline is no longer paused: it also runs on Sundays, and on each version that "
            "data_refresh makes",
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

    Earlier stages come out of the stage cache; the result goes into it.
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
    from pipelines.training.recipe_check import check_recipe

    recipe = with_absolute_paths(load_recipe(name, overrides), Path.cwd())
    if recipe.data.source.is_published:
        recipe, _ = settle(recipe)
    else:
        list_inputs(recipe.data.source)  # a missing path is better said now than by a task
    check_recipe(recipe)
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

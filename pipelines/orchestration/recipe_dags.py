"""The DAGs of the project's recipes: which there are, when each runs, for whom, with which form.

A recipe that cannot be read has no DAG and shows as an import error of its own, for which a file
that raises it lies in a DAG folder of its own; the other recipes go on. A recipe that was deleted,
renamed or broken keeps its DAG while Airflow has a queued or running run of it, as Airflow starts
nothing of a DAG that is gone: a run that had begun goes on, and in another *prepare* fails.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import (
    DAG,
    Asset,
    AssetAny,
    AssetOrTimeSchedule,
    CronTriggerTimetable,
    get_parsing_context,
)

from pipelines.core.errors import UserError
from pipelines.core.settings import BROKEN_RECIPES, load_settings
from pipelines.core.storage import write_text
from pipelines.datasets.dataset_publishing import dataset_name
from pipelines.orchestration.dataset_refresh import DATASET_VERSION, dataset_asset
from pipelines.orchestration.deadline import deadline
from pipelines.orchestration.naming import champion_asset, live_recipes
from pipelines.orchestration.stage_task import RETRIES
from pipelines.orchestration.trigger_form import trigger_form
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_own_recipe, project_recipes
from pipelines.recipe.schedule_section import MAIN_DAG, REFRESH, REFRESH_DAG, Schedule
from pipelines.run.records import stage_names

# Airflow reads a file only if it holds the words "airflow" and "dag".
_BROKEN = '''"""Written for Airflow's DAG processor while the recipe below cannot be read."""

from pipelines.core.errors import UserError

raise UserError({message!r})
'''


def recipe_dags(about: str | None) -> Iterator[DAG]:
    """Yield each DAG that runs the whole pipeline, without tasks: by hand, then one a recipe.

    Args:
        about: The documentation of the DAG file.
    """
    if _wanted(MAIN_DAG):
        # A version of a dataset that no recipe waits for starts the recipe that it was made with.
        yield from _with_form(
            None,
            dag_id=MAIN_DAG,
            description="Preprocess, validate, train, evaluate and register a language model",
            schedule=[DATASET_VERSION],
            max_active_runs=4,
            deadline=deadline(),
            doc_md=about,
        )
    for dag_id, recipe in _recipes(MAIN_DAG):
        yield from _with_form(
            recipe,
            dag_id=dag_id,
            description=recipe.description,
            schedule=_timetable(recipe.schedule),
            deadline=deadline(recipe.schedule.deadline_hours),
        )


def refresh_dags(about: str | None) -> Iterator[DAG]:
    """Yield each DAG that looks for new data, without tasks: by hand, then one a recipe.

    Args:
        about: The documentation of the DAG file.
    """
    if _wanted(REFRESH_DAG):
        yield from _with_form(
            None,
            dag_id=REFRESH_DAG,
            description="Look for new data; publish them as a dataset version",
            schedule=None,
            doc_md=about,
        )
    for dag_id, recipe in _recipes(REFRESH_DAG):
        told, times = recipe.description, None
        if cron := recipe.schedule.refresh:
            told = f"Look for new data of {dataset_name(recipe)}; publish a version"
            times = _times(cron, recipe.schedule)
        yield from _with_form(recipe, dag_id=dag_id, description=told, schedule=times)


def _with_form(recipe: Recipe | None, **arguments: Any) -> Iterator[DAG]:
    """Yield a DAG, and give it its form when its tasks are there.

    Airflow copies and checks a DAG's fields for each task, which for 200 recipes takes seconds.
    """
    common: dict[str, Any] = {"max_active_runs": 1, "catchup": False, "tags": ["penstock"]}
    defaults: dict[str, Any] = {"owner": "penstock"} | RETRIES
    if recipe:
        schedule = recipe.schedule
        common["is_paused_upon_creation"] = schedule.paused
        common["tags"] = ["penstock", *schedule.tags]
        # Airflow would read a text that ends in .md from a file of that name.
        common["doc_md"] = f"The recipe `{recipe.name}`. {recipe.description}\n"
        defaults |= {"owner": schedule.owner, "priority_weight": schedule.priority}
    dag = DAG(**(common | arguments), default_args=defaults)
    yield dag
    if get_parsing_context().task_id not in stage_names():  # they have the run's recipe
        dag.params.update(trigger_form(recipe))


def _timetable(schedule: Schedule) -> Any:
    """Return what starts the recipe: times, assets, either of them, or None."""
    assets = _assets(schedule)
    if schedule.cron is None:
        return AssetAny(*assets) if assets else None
    times = _times(schedule.cron, schedule)
    return AssetOrTimeSchedule(timetable=times, assets=AssetAny(*assets)) if assets else times


def _assets(schedule: Schedule) -> list[Asset]:
    found = [dataset_asset(schedule.dataset)] if schedule.dataset else []
    return found + (
        [Asset(champion_asset(schedule.model.partition("@")[0]))] if schedule.model else []
    )


def _times(cron: str, schedule: Schedule) -> CronTriggerTimetable:
    # Of the times that are past when Airflow first reads the recipe, one is run if it came while
    # the recipe waited to be read, which takes a minute; none if it is older.
    waited = timedelta(minutes=2)
    return CronTriggerTimetable(cron, timezone=schedule.timezone, run_immediately=waited)


def _wanted(dag_id: str) -> bool:
    """Return whether this process needs the DAG: a task's process needs its own one only."""
    return get_parsing_context().dag_id in (None, dag_id)


def _recipes(file: str) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipes of a DAG file by their DAGs; write the errors of those it cannot read."""
    ending = REFRESH if file == REFRESH_DAG else ""
    errors: dict[str, str] = {}
    made: set[str] = set()
    for path in project_recipes():
        dag_id = path.stem + ending
        if not _wanted(dag_id):
            continue
        try:
            recipe = load_own_recipe(path)
        except UserError as error:
            errors[path.stem] = str(error)
            continue
        if recipe.schedule.refresh or not ending:
            made.add(dag_id)
            yield dag_id, recipe
    for dag_id, its_file in live_recipes().items():
        if its_file == file and dag_id not in made and _wanted(dag_id):
            yield dag_id, _gone(dag_id.removesuffix(REFRESH))
    if file == MAIN_DAG and get_parsing_context().dag_id is None:
        _show_errors(errors)


def _gone(name: str) -> Recipe:
    """Return what stands for a recipe that is gone while a run of its DAG is not over."""
    told = "Its recipe was deleted, renamed or broken; a run that had begun goes on."
    return Recipe(name=name, description=told, schedule=Schedule(tags=("deleted",)))


def broken_recipes() -> Path:
    """Return the DAG folder with one file for each recipe that cannot be read."""
    return load_settings().home / "airflow" / BROKEN_RECIPES


def _show_errors(errors: dict[str, str]) -> None:
    folder = broken_recipes()
    for name, message in errors.items():
        path, text = folder / f"{name}.py", _BROKEN.format(message=message)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    for path in folder.glob("*.py"):
        if path.stem not in errors:
            path.unlink(missing_ok=True)

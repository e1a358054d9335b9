"""The DAGs of the project's recipes: which there are, when each runs, for whom, with which form.

A recipe that cannot be read has no DAG and shows as an import error of its own, for which a file
that raises it lies in a DAG folder of its own; the other recipes go on. A recipe that was deleted,
renamed or broken while it runs keeps its DAG until that run is over.
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

from pipelines.core.errors import UserError, one_line
from pipelines.core.product import recipes_folder
from pipelines.core.settings import BROKEN_RECIPES, PROJECT, load_settings
from pipelines.core.storage import write_text
from pipelines.datasets.dataset_publishing import dataset_name
from pipelines.orchestration.dataset_refresh import DATASET_VERSION, dataset_asset
from pipelines.orchestration.deadline import deadline
from pipelines.orchestration.naming import (
    MAIN_DAG,
    REFRESH_DAG,
    SWEEP_DAG,
    champion_asset,
    running_recipes,
)
from pipelines.orchestration.stage_task import RETRIES
from pipelines.orchestration.trigger_form import trigger_form
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe, parse_recipe, project_recipes
from pipelines.recipe.schedule_section import Schedule

_RESERVED = (MAIN_DAG, REFRESH_DAG, SWEEP_DAG)
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
    for name, recipe in _recipes(MAIN_DAG):
        yield from _with_form(
            recipe,
            dag_id=name,
            description=recipe.description,
            schedule=_timetable(name, recipe),
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
    for name, recipe in _recipes(REFRESH_DAG):
        if cron := recipe.schedule.refresh:
            times = _cron(f"recipes/{name}.yaml: schedule.refresh", cron, recipe.schedule.timezone)
            yield from _with_form(
                recipe,
                dag_id=f"{name}.refresh",
                description=f"Look for new data of {dataset_name(recipe)}; publish a version",
                schedule=times,
            )


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
        common["doc_md"] = f"The recipe `{recipe.name}`. {recipe.description}"
        defaults |= {"owner": schedule.owner, "priority_weight": schedule.priority}
    dag = DAG(**(common | arguments), default_args=defaults)
    yield dag
    dag.params.update(trigger_form(recipe))


def _timetable(name: str, recipe: Recipe) -> Any:
    """Return what starts the recipe: times, assets, either of them, or None."""
    schedule = recipe.schedule
    assets = _assets(schedule)
    if schedule.cron is None:
        return AssetAny(*assets) if assets else None
    times = _cron(f"recipes/{name}.yaml: schedule.cron", schedule.cron, schedule.timezone)
    return AssetOrTimeSchedule(timetable=times, assets=AssetAny(*assets)) if assets else times


def _assets(schedule: Schedule) -> list[Asset]:
    found = [dataset_asset(schedule.dataset)] if schedule.dataset else []
    return found + (
        [Asset(champion_asset(schedule.model.partition("@")[0]))] if schedule.model else []
    )


def _cron(where: str, cron: str, timezone: str) -> CronTriggerTimetable:
    # Without it the time that is past when the DAG is switched on would also be run.
    times = CronTriggerTimetable(cron, timezone=timezone, run_immediately=timedelta(0))
    try:
        times.validate()
    except Exception as error:
        raise UserError(f"{where} = {cron!r}: {one_line(error)}") from error
    return times


def _wanted(dag_id: str) -> bool:
    """Return whether this process needs the DAG: a task's process needs its own one only."""
    return get_parsing_context().dag_id in (None, dag_id)


def _recipes(of: str) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipes that a DAG file needs by name; write the errors of those it cannot read."""
    wanted = get_parsing_context().dag_id
    errors: dict[str, str] = {}
    read: set[str] = set()
    for path in project_recipes():
        name = path.stem
        if wanted not in (None, name, f"{name}.refresh"):
            continue
        try:
            recipe = _checked(path)
        except UserError as error:
            errors[name] = str(error)
            continue
        read.add(name)
        yield name, recipe
    if of == MAIN_DAG:
        for dag_id, values in running_recipes().items():
            if dag_id not in read and wanted in (None, dag_id):
                yield dag_id, _last_of(parse_recipe(values, where=dag_id))
        if wanted is None:
            _show_errors(errors)


def _checked(path: Path) -> Recipe:
    where = f"{recipes_folder(PROJECT).name}/{path.name}"
    try:
        recipe = load_recipe(path)
    except UserError as error:
        raise UserError(str(error).replace(str(path), where, 1)) from None
    if recipe.name != path.stem:
        raise UserError(
            f"{where}: name = {recipe.name!r}, but the file is {path.name}; "
            "a recipe's file has its name"
        )
    if recipe.name in _RESERVED:
        raise UserError(f"{where}: a DAG of Penstock has the name {recipe.name}; choose another")
    _timetable(recipe.name, recipe)
    return recipe


def _last_of(recipe: Recipe) -> Recipe:
    """Return the recipe of a run that goes on although its file is gone, without a schedule."""
    told = "Its file was deleted, renamed or broken; the run that had begun goes on."
    schedule = Schedule(owner=recipe.schedule.owner, tags=("deleted",))
    return recipe.model_copy(update={"description": told, "schedule": schedule})


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

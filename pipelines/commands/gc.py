"""`penstock gc`: old workspaces, checkpoints and cached results away."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.models import check_mlflow_answers
from pipelines.commands.options import Json
from pipelines.core.formatting import size
from pipelines.core.settings import load_settings

if TYPE_CHECKING:
    from pipelines.core.settings import Settings
    from pipelines.platform.airflow_api import AirflowApi


def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Do it; else it is only told.")] = False,
    days: Annotated[
        float, typer.Option(min=0, help="A run that succeeded, and a result in the stage cache.")
    ] = 14,
    failed_days: Annotated[float, typer.Option(min=0, help="A run that failed.")] = 3,
    checkpoint_days: Annotated[
        float, typer.Option(min=0, help="The checkpoints of a run that succeeded.")
    ] = 2,
    keep_last: Annotated[
        int, typer.Option(min=0, help="Runs that succeeded, of each recipe, however old.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Remove what old runs left.

    Workspaces, checkpoints, cached results, and jobs that nobody awaits.

    Kept are what lives or changed within the hour, the last runs of each recipe, and all of a run
    whose model an alias names. Without --delete nothing is touched.
    """
    from pipelines.platform import garbage_collection
    from pipelines.platform.airflow_api import AirflowApi
    from pipelines.platform.garbage_collection import Rules

    settings = load_settings()
    airflow = AirflowApi(settings)
    check_mlflow_answers()
    stopped = _stop_orphans(settings, airflow) if delete else []
    rules = Rules(days, failed_days, checkpoint_days, keep_last)
    aliased = garbage_collection.aliased_models()
    found = []
    for each in garbage_collection.collect(settings, airflow, rules, aliased, delete=delete):
        found.append(each)
        if not as_json:
            typer.echo(f"{size(each.bytes):>9}  {each.what:<12} {each.name}: {each.why}")
    total = sum(each.bytes for each in found)
    if as_json:
        items = [dataclasses.asdict(each) for each in found]
        facts = {"deleted": delete, "bytes": total, "found": items, "stopped_jobs": stopped}
        typer.echo(json.dumps(facts, indent=2))
    elif not found:
        typer.echo("nothing is old enough to go")
    elif delete:
        typer.echo(f"{size(total):>9}  freed")
    else:
        typer.echo(f"{size(total):>9}  would be freed; do it with --delete")


def _stop_orphans(settings: "Settings", airflow: "AirflowApi") -> list[str]:
    """Jobs that nobody waits for would keep what they write to."""
    import httpx

    from pipelines.platform.reconciler import reconcile_once

    try:
        stopped = reconcile_once(settings, lambda: airflow)
    except httpx.HTTPError as error:
        typer.echo(f"warning: Ray's jobs were not looked at: {error}", err=True)
        return []
    for job in stopped:
        typer.echo(f"stopped Ray job {job}, for which nobody waited", err=True)
    return stopped

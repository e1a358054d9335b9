"""`penstock gc`: delete old workspaces, checkpoints and cached results."""

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
    delete: Annotated[bool, typer.Option("--delete", help="Delete; else only list.")] = False,
    days: Annotated[
        float, typer.Option(min=0, help="Age limit of successful runs and cached results.")
    ] = 14,
    failed_days: Annotated[float, typer.Option(min=0, help="Age limit of failed runs.")] = 3,
    checkpoint_days: Annotated[
        float, typer.Option(min=0, help="Age limit of successful runs' checkpoints.")
    ] = 2,
    keep_last: Annotated[
        int, typer.Option(min=0, help="Keep this many successful runs per recipe.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Delete what old runs left behind.

    These are workspaces, checkpoints, cached results, and Ray jobs that no task waits for.

    It keeps what is in use or changed within the last hour, the last runs of each recipe, and every
    file of a run whose model an alias names. Without --delete it changes nothing.
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
        typer.echo("nothing is old enough to delete")
    elif delete:
        typer.echo(f"{size(total):>9}  freed")
    else:
        typer.echo(f"{size(total):>9}  would be freed; add --delete to free it")


def _stop_orphans(settings: "Settings", airflow: "AirflowApi") -> list[str]:
    """Stop and return the jobs that no task waits for: they would keep the files they write."""
    import httpx

    from pipelines.platform.reconciler import reconcile_once

    try:
        stopped = reconcile_once(settings, lambda: airflow)
    except httpx.HTTPError as error:
        typer.echo(f"warning: Ray's jobs could not be checked: {error}", err=True)
        return []
    for job in stopped:
        typer.echo(f"stopped Ray job {job}: no task waited for it", err=True)
    return stopped

"""`penstock up | down | status | env | logs`."""

import sys
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.settings import load_settings


def up() -> None:
    """Start Airflow, Ray and MLflow on this machine and wait until they answer.

    A second call starts only the parts that are not up. These variables set the ports:
    PENSTOCK_AIRFLOW_PORT, PENSTOCK_MLFLOW_PORT, PENSTOCK_RAY_PORT and PENSTOCK_RAY_GCS_PORT.
    PENSTOCK_HOME is the state folder; PENSTOCK_GPU_JOBS, how many jobs train or evaluate at once.
    """
    from pipelines.platform import platform, preflight

    settings = load_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    for warning in preflight.resource_warnings(settings.home):
        typer.echo(f"warning: {warning}", err=True)
    try:
        platform.up(
            settings, lambda part, seconds: typer.echo(f"  ready {part:<14}{seconds:5.1f} s")
        )
    except platform.PartFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    _show_addresses()


def down() -> None:
    """Stop what `penstock up` started, and nothing else."""
    from pipelines.platform import platform

    was_up = platform.down(load_settings())
    typer.echo("the platform is down" if was_up else "the platform was not up")


def status(as_json: Json = False) -> None:
    """Show which parts run, with their addresses and log files.

    The exit code is 1 unless every part is ready.
    """
    import dataclasses
    import json

    from pipelines.platform import platform

    settings = load_settings()
    parts = platform.status(settings)
    ready = all(part.state == "ready" for part in parts)
    if as_json:
        login = {
            "user": settings.airflow_user,
            "password_file": str(settings.airflow_password_path),
        }
        values = [dataclasses.asdict(part) for part in parts]
        typer.echo(json.dumps({"ready": ready, "parts": values, "airflow_login": login}, indent=2))
    else:
        for part in parts:
            where = part.url or ""
            typer.echo(
                f"  {part.name:<14}{part.state:<10}{part.pid or '-':>8}  {where:<24}{part.log}"
            )
        if ready:
            _show_addresses()
    raise typer.Exit(0 if ready else 1)


def env() -> None:
    """Print the variables for ray, mlflow and airflow: eval "$(penstock env)"."""
    from pipelines.platform.environment import shell_exports

    typer.echo(shell_exports(load_settings()))


def logs(
    part: Annotated[str | None, typer.Argument(help="A part that `penstock status` names.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines too.")] = False,
) -> None:
    """Print a part's log, or the last lines of every part's log."""
    from pipelines.platform import logs as service_logs

    settings = load_settings()
    chosen = service_logs.logs_of(settings, part)
    if follow:
        service_logs.follow(chosen, sys.stdout)
    else:
        service_logs.show(chosen, sys.stdout, last=None if part else 10)


def _show_addresses() -> None:
    settings = load_settings()
    typer.echo(
        f"Airflow  {settings.airflow_url}  user {settings.airflow_user}, "
        f"password in {settings.airflow_password_path}\n"
        f"MLflow   {settings.mlflow_url}\n"
        f"Ray      {settings.ray_url}  token in {settings.ray_token_path}"
    )

"""`penstock backup` and `penstock restore`: a copy of the platform's home, and a home from it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pipelines.core.errors import UserError
from pipelines.core.formatting import size
from pipelines.core.settings import load_settings


def backup(
    to: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
) -> None:
    """Copy the platform's home, while it runs, so that `penstock restore` can make it again.

    That is Airflow's and MLflow's databases, models, runs with their checkpoints, datasets, the
    stage cache, and, encrypted, passwords and keys. PENSTOCK_BACKUP_PASSPHRASE is the passphrase;
    without it, you are asked. Files in S3 and the project's git repository are not in it.
    """
    from pipelines.platform.backup import back_up
    from pipelines.run.progress import meter_on_stderr

    settings = load_settings()
    copied = back_up(settings, to, _passphrase(new=True), meter_on_stderr("backup"))
    typer.echo(f"{size(copied)} of {settings.home} are in {to}")


def restore(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="A folder of `penstock backup`.")],
) -> None:
    """Make the platform's home from a backup; `penstock up` then goes on with its runs.

    The home must be where it was, PENSTOCK_HOME, and must not exist. Every file is checked against
    its hash, and the home is there whole or not at all.
    """
    from pipelines.platform.backup import restore as make_home
    from pipelines.run.progress import meter_on_stderr

    settings = load_settings()
    copied = make_home(settings, source, _passphrase(new=False), meter_on_stderr("restore"))
    typer.echo(f"{size(copied)} are in {settings.home}; `penstock up` starts the platform")


def _passphrase(*, new: bool) -> str:
    from pipelines.platform.backup import PASSPHRASE

    given = os.environ.get(PASSPHRASE)
    if given is None and typer.get_text_stream("stdin").isatty():
        given = str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=new))
    if not given:
        raise UserError(f"set {PASSPHRASE} to the passphrase that encrypts passwords and keys")
    return given

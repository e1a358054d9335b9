"""Options that several commands share."""

import getpass
import os
import socket
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RecipeName = Annotated[
    str,
    typer.Option("--recipe", "-r", metavar="R", help="A shipped recipe's name or a YAML file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="E.g. train.lr=3e-4; repeatable."),
]


def who() -> str:
    """Return the user of this command as `user@host`, for the audit trail."""
    return f"{user_name()}@{socket.gethostname()}"


def user_name() -> str:
    """Return the name of the user of this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()}"

"""Options that several commands share."""

import getpass
import os
import socket
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RecipeName = Annotated[
    str,
    typer.Option("--recipe", "-r", metavar="R", help="A shipped recipe's name, or a YAML file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Such as train.lr=3e-4; repeatable."),
]


def who() -> str:
    """Return who uses this command, for the audit trail: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user without a name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"

"""Options that several commands share."""

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

"""`penstock bench`: the project's benchmarks; each measures a ratio to a named baseline."""

import subprocess
import sys
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.product import PRODUCT


def bench(
    name: Annotated[str | None, typer.Argument(help="Without it, list them.")] = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Rounds each; with too few, no result is kept.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure Penstock against baselines, in interleaved rounds.

    `make bench-env` installs the compared projects.
    """
    if not (PRODUCT / "tests" / "benchmarks").is_dir():
        raise UserError(f"{PRODUCT} holds no tests/benchmarks; benchmarks run in a git checkout")
    command = [sys.executable, "-m", "tests.benchmarks"]
    command += [name] if name else []
    command += ["--pairs", str(pairs)] if pairs else []
    command += ["--json"] if as_json else []
    raise typer.Exit(subprocess.run(command, cwd=PRODUCT, check=False).returncode)

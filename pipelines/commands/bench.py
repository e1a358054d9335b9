"""`penstock bench`: the project's benchmarks, each a ratio against a named baseline."""

import subprocess
import sys
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT


def bench(
    name: Annotated[str | None, typer.Argument(help="Without one, they are listed.")] = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each; with fewer than usual none is kept.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure us against baselines, in interleaved rounds.

    `make bench-env` installs the peers.
    """
    if not (PROJECT / "tests" / "benchmarks").is_dir():
        raise UserError(f"{PROJECT} holds no tests/benchmarks; benchmarks run in a git checkout")
    command = [sys.executable, "-m", "tests.benchmarks"]
    command += [name] if name else []
    command += ["--pairs", str(pairs)] if pairs else []
    command += ["--json"] if as_json else []
    raise typer.Exit(subprocess.run(command, cwd=PROJECT, check=False).returncode)

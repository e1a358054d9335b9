"""`penstock report`: the pages of a run."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings


def report(
    run: Annotated[
        str | None,
        typer.Argument(help="The id of a run; the newest if it is left out.", metavar="[RUN]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print where a run's pages are, and open the most telling one in the browser.

    It compares the new model with the champion; of a run that has not got so far it is the
    evaluation's report, or the report of the data gate.
    """
    from pipelines.run.workspace import Run, find_workspace

    workspace = find_workspace(load_settings().runs, run)
    pages = {name: path for name, path in _pages(workspace).items() if path.is_file()}
    facts = Run.read(workspace)
    told = {"run": facts.dag_run_id} | {name: str(path) for name, path in pages.items()}
    told |= {"mlflow": facts.mlflow_address} if facts.mlflow_address else {}
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for name, where in told.items():
        typer.echo(f"{name:<11}{where}")
    if not pages:
        raise UserError(f"the run {facts.dag_run_id} has no page yet: no stage with one has ended")
    if sys.stdout.isatty():
        typer.launch(next(iter(pages.values())).as_uri())


def _pages(workspace: Path) -> dict[str, Path]:
    """Return where the pages of the stages lie, the most telling one first."""
    from pipelines.run.records import DATA_DOCS

    outputs = workspace / "outputs"
    return {
        "comparison": outputs / "register" / "compare.html",
        "evaluation": outputs / "evaluate" / "report.html",
        "data gate": outputs / "validate" / DATA_DOCS,
    }

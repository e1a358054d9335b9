"""`penstock report` and `penstock why`: the pages of a run, and what happened to it."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings

RunId = Annotated[
    str | None,
    typer.Argument(help="The id of a run; the newest if it is left out.", metavar="[RUN]"),
]


def report(run: RunId = None, as_json: Json = False) -> None:
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


def why(run: RunId = None, as_json: Json = False) -> None:
    """Tell in ten lines what happened to a run first, what followed, what it cost, what to do.

    It reads the run's folder, and Airflow and Ray if they answer; slow training is told, too.
    """
    from pipelines.platform.postmortem import explain
    from pipelines.platform.run_evidence import gather
    from pipelines.run.workspace import find_workspace
    from pipelines.stages.stage_process import ERROR_FILE, FAILURE_FILE

    settings = load_settings()
    workspace = find_workspace(settings.runs, run, ERROR_FILE, FAILURE_FILE)
    told = explain(gather(settings, workspace))
    lines = told.pop("lines")
    typer.echo(json.dumps(told, indent=2) if as_json else "\n".join(lines))

"""`penstock data list | show | verify`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.formatting import size

if TYPE_CHECKING:
    from pipelines.datasets.versions import DatasetVersion

app = typer.Typer(help="Show and verify dataset versions.", no_args_is_help=True)

Version = Annotated[
    str, typer.Argument(metavar="NAME[@N]", help="E.g. stdlib-code@3; without @N, the newest.")
]


@app.command("list")
def list_versions(
    name: Annotated[str | None, typer.Argument(help="A dataset; without it, list all.")] = None,
    as_json: Json = False,
) -> None:
    """List dataset versions: rows, tokens, size, hash, recipe and the data gate's result."""
    from pipelines.datasets import versions

    found = versions.list_versions(name)
    if name and not found:
        versions.find(name)  # its error names the datasets that exist
    if as_json:
        typer.echo(_json([_facts(version) for version in found]))
        return
    if not found:
        typer.echo("there is no dataset version yet; the DAG data_refresh makes them", err=True)
        return
    # A table of rich, with its own layout of each cell, would take a second for 1,000 versions.
    titles = ("version", "made (UTC)", "rows", "tokens", "size", "hash", "recipe", "data gate")
    columns = list(zip(titles, *map(_row, found), strict=True))
    numbers = ("rows", "tokens", "size")
    aligned = []
    for column in columns:
        width = max(map(len, column))
        align = str.rjust if column[0] in numbers else str.ljust
        aligned.append([align(cell, width) for cell in column])
    typer.echo("\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True)))


def _row(version: "DatasetVersion") -> tuple[str, ...]:
    return (
        version.label,
        _made(version),
        f"{version.documents:,}",
        f"{version.tokens:,}",
        size(version.bytes),
        version.directory_hash[:8],
        version.recipe["name"],
        _gate(version),
    )


@app.command()
def show(version: Version, as_json: Json = False) -> None:
    """Show a version: its data, how it was made and which models were trained on it."""
    from pipelines.datasets import versions

    found = versions.find(version)
    models, no_models = _models(found.label)
    if as_json:
        typer.echo(_json({**_facts(found), "models": models}))
        return
    source, run = found.source, found.run
    changes = ", with uncommitted changes" if run["dirty"] else ""
    lines = {
        "made": f"{_made(found)} UTC by {run['dag_run_id']}",
        "code": f"commit {run['git_commit'][:12]}{changes}",
        "recipe": found.recipe["name"],
        "source": f"{found.recipe['data']['source']['kind']}, {source['files']:,} files, "
        f"{size(source['bytes'])}, sha256 {source['sha256'][:12]}",
        "rows": f"{found.documents:,} ({found.dataset.validation.documents:,} held out)",
        "tokens": f"{found.tokens:,} ({found.dataset.validation.tokens:,} held out)",
        "size": f"{size(found.bytes)} in {found.files:,} files",
        "hash": found.directory_hash,
        "git": found.git_revision,
        "data gate": _gate(found),
        "models": no_models or ", ".join(models or ["none yet"]),
    }
    typer.secho(found.label, bold=True)
    for title, text in lines.items():
        typer.echo(f"  {title:<9}  {text}")


@app.command()
def verify(version: Version, as_json: Json = False) -> None:
    """Hash every stored file of a version; the exit code is 1 if a file is damaged."""
    from pipelines.datasets import versions

    found = versions.find(version)
    damaged = {file.path: why for file, why in versions.verify(found)}
    if as_json:
        facts = {"version": found.label, "files": found.files, "damaged": damaged}
        typer.echo(json.dumps(facts, indent=2))
    elif not damaged:
        typer.echo(f"{found.label}: {found.files:,} files, {size(found.bytes)}, all sound")
    for path, why in damaged.items():
        typer.echo(f"{found.label}: {path} {why}", err=True)
    raise typer.Exit(1 if damaged else 0)


def _facts(version: "DatasetVersion") -> dict[str, Any]:
    counts = {"label": version.label, "documents": version.documents, "tokens": version.tokens}
    return counts | version.model_dump(exclude={"dataset"})


def _json(facts: object) -> str:
    from pydantic_core import to_json  # json's own needs a second for 1,000 versions

    return to_json(facts, indent=2).decode()


def _models(label: str) -> tuple[list[str] | None, str | None]:
    """Return the models trained on a version, or None and why they are not known."""
    from pipelines.commands.models import check_mlflow_answers

    try:
        check_mlflow_answers()
    except UserError as error:
        return None, f"not known: {error}"
    from pipelines.tracking.run_search import models_of_dataset

    return [f"{model.name} version {model.version}" for model in models_of_dataset(label)], None


def _made(version: "DatasetVersion") -> str:
    return version.created.strftime("%Y-%m-%d %H:%M") if version.created else ""


def _gate(version: "DatasetVersion") -> str:
    return f"passed {version.validation['expectations']}"

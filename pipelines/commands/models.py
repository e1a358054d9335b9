"""`penstock models list | show | promote | rollback | reproduce | generate`."""

import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import Json, who
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings

if TYPE_CHECKING:
    from pipelines.registry.registry import ModelVersion

app = typer.Typer(help="Show and manage registered models.", no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="NAME[@ALIAS or @VERSION]", help="E.g. my-model@champion.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A registered model.")]
Why = Annotated[str, typer.Option(help="The reason, for the audit trail.")]


_ANSWER_WITHIN_S = 3.0


@app.command("list")
def list_models(
    as_tree: Annotated[
        bool, typer.Option("--tree", help="Draw which version was trained from which.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List registered models with their newest version and the versions that aliases name."""
    check_mlflow_answers()
    from pipelines.registry import registry

    if as_tree:
        _list_tree(as_json)
        return

    models = registry.list_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in models], indent=2))
        return
    if not models:
        typer.echo("no model is registered yet; `penstock run` makes one", err=True)
    for model in models:
        champion = f"champion {model.champion}" if model.champion else "no champion"
        others = {"previous": model.previous, "challenger": model.challenger}
        named = "".join(f", {alias} {number}" for alias, number in others.items() if number)
        typer.echo(f"{model.name}  versions to {model.latest}, {champion}{named}")


def _list_tree(as_json: bool) -> None:
    from rich.console import Console

    from pipelines.commands.lineage_tree import family_tree
    from pipelines.registry import registry

    versions = [each for model in registry.list_models() for each in registry.show(model.name)]
    if as_json:
        parents = {each.label: each.parent for each in versions}
        typer.echo(json.dumps(parents, indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(family_tree(versions))


@app.command()
def show(
    model: Model,
    lineage: Annotated[
        bool, typer.Option("--lineage", help="Show a version's lineage; default: the champion's.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a model's versions, newest first, and who chose each champion, when and why.

    With --lineage, show one version's data, code and run, and its cost.
    """
    check_mlflow_answers()
    from pipelines.registry import registry

    name, _, which = model.partition("@")
    if lineage:
        _show_lineage(registry.named(model), as_json)
        return
    if which:
        raise UserError(f"{model}: give {name} to show all versions, or add --lineage for one")
    versions = registry.show(name)
    trail = registry.audit_trail(name)
    if as_json:
        facts = {
            "name": name,
            "versions": [dataclasses.asdict(version) for version in versions],
            "audit": [entry.to_dict() for entry in trail.entries],
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    for version in versions:
        _print_version(version)
    if trail.entries:
        typer.echo("audit trail")
    for entry in trail.entries:
        when = datetime.fromisoformat(entry.when).strftime("%Y-%m-%d %H:%M")
        moved = f"{entry.before or 'none'} → {entry.after or 'none'}"
        typer.echo(f"  {when} UTC  {entry.action} {moved} by {entry.who}: {entry.why}")
    if trail.unfinished:
        typer.echo("  the last entry is unfinished; the next promotion or rollback completes it")


@app.command()
def promote(model: Model, why: Why = "", as_json: Json = False) -> None:
    """Verify a version's files and make it the champion, whatever the gate decided."""
    check_mlflow_answers()
    from pipelines.registry import promotion, registry

    name, _, which = model.partition("@")
    if not which:
        raise UserError(f"{name}: add a version: {name}@N; `penstock models show {name}` lists all")
    before = registry.champion(name)
    wanted = registry.find(name, which)
    over = before.version if before else None
    _tell(promotion.promote(wanted, over, who(), why), before, as_json)


@app.command()
def rollback(name: Name, why: Why = "", as_json: Json = False) -> None:
    """Make the previous champion the champion again; repeat it to go further back."""
    check_mlflow_answers()
    from pipelines.registry import promotion, registry

    before = registry.champion(name)
    over = before.version if before else None
    _tell(promotion.rollback(name, over, who(), why), before, as_json)


@app.command()
def reproduce(model: Model, as_json: Json = False) -> None:
    """Train a version again from its commit, data and recipe, and compare the weights.

    The exit code is 0 if the weights are equal, byte for byte, and 1 if they are not.
    """
    check_mlflow_answers()
    from pipelines.platform import reproduction
    from pipelines.registry import registry

    origin = reproduction.find_origin(registry.named(model))
    differences = origin.differences()
    for each in differences:
        typer.echo(f"warning: the weights may differ: {each}", err=True)
    made = reproduction.reproduce(origin)
    label = origin.version.label
    if as_json:
        facts = {"model": label, "equal": made.equal, "model_hash": made.model_hash}
        more = {"differing": made.differing, "environment": differences}
        typer.echo(json.dumps({**facts, **more, "workspace": str(made.workspace)}, indent=2))
    elif made.equal:
        typer.echo(f"{label} is reproduced: the weights are equal, byte for byte")
    else:
        typer.echo(f"{label} is not reproduced: {', '.join(made.differing)} differ")
    if not as_json:
        typer.echo(str(made.workspace))
    raise typer.Exit(0 if made.equal else 1)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The start of the text.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy sampling.")] = 0.7,
    seed: Annotated[int, typer.Option(help="The seed of sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Let a registered model continue a text."""
    check_mlflow_answers()
    from pipelines.evaluation.generate import generate as continue_text
    from pipelines.registry import registry

    folder = registry.verified_folder(registry.named(model))
    (text,) = continue_text(folder, [prompt], tokens, temperature=temperature, seed=seed)
    if as_json:
        typer.echo(json.dumps({"model": model, "prompt": prompt, "continuation": text}))
    else:
        typer.echo(prompt + text)


def check_mlflow_answers() -> None:
    """Check that MLflow answers: its own client tries for 13 s, then raises a page of text."""
    import httpx

    url = load_settings().mlflow_url
    if not url.startswith("http://"):  # MLflow's own settings say how to reach an https server
        return
    try:
        httpx.get(f"{url}/health", timeout=_ANSWER_WITHIN_S)
    except httpx.TransportError as error:
        raise UserError(f"no MLflow server at {url} ({error}); `penstock up` starts it") from None


def _show_lineage(version: "ModelVersion", as_json: bool) -> None:
    from pipelines.core.storage import read_json
    from pipelines.registry import registry

    path = registry.verified_folder(version) / registry.LINEAGE
    if not path.is_file():
        raise UserError(f"{version.label} has no {path.name}: it was not made by a run of Penstock")
    facts = read_json(path)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console

    from pipelines.commands.lineage_tree import lineage_tree

    line = registry.descent(version)
    Console(highlight=False, soft_wrap=True).print(lineage_tree(line, facts))


def _print_version(version: "ModelVersion") -> None:
    made = datetime.fromtimestamp(version.created / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    aliases = " ".join(f"@{alias}" for alias in version.aliases)
    score = version.tags.get("penstock.bits_per_byte")
    by = f"MLflow run {version.run_id}" if version.run_id else "no MLflow run"
    typer.echo(f"{version.name} version {version.version} {aliases}".rstrip())
    typer.echo(f"  made   {made} UTC by {by}")
    typer.echo(f"  score  {f'{float(score):.4f} bits per byte' if score else 'not known'}")
    typer.echo(f"  why    {version.description}")


def _tell(champion: "ModelVersion", before: "ModelVersion | None", as_json: bool) -> None:
    was = before.version if before else None
    if as_json:
        facts = {"champion_before": was, **dataclasses.asdict(champion)}
        typer.echo(json.dumps(facts, indent=2))
    elif was == champion.version:
        typer.echo(f"{champion.label} is the champion already")
    else:
        typer.echo(f"{champion.label} is the champion now; before: {was or 'none'}")
    if was != champion.version:
        _announce(champion)


def _announce(champion: "ModelVersion") -> None:
    """Start the recipes that wait for this champion; a promotion without Airflow starts none."""
    from pipelines.orchestration.naming import champion_asset
    from pipelines.platform.airflow_api import AirflowApi

    asset = champion_asset(champion.name)
    try:
        AirflowApi(load_settings()).announce(asset, {"version": champion.version})
    except UserError as error:
        typer.echo(f"warning: recipes that wait for {asset} are not started: {error}", err=True)

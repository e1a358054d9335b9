"""`penstock models list | show | generate`."""

import dataclasses
import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings

app = typer.Typer(help="Registered models.", no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="NAME[@ALIAS or @VERSION]", help="Such as my-model@champion.")
]


_ANSWER_WITHIN_S = 3.0


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """Name every registered model, its newest version and its champion."""
    check_mlflow_answers()
    from pipelines.tracking import registry

    models = registry.list_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in models], indent=2))
        return
    if not models:
        typer.echo("no model is registered yet; `penstock run` makes one", err=True)
    for model in models:
        champion = f"champion {model.champion}" if model.champion else "no champion"
        typer.echo(f"{model.name}  versions to {model.latest}, {champion}")


@app.command()
def show(name: str, as_json: Json = False) -> None:
    """Print a model's versions: aliases, bits per byte, MLflow run, why it was promoted."""
    check_mlflow_answers()
    from pipelines.tracking import registry

    versions = registry.show(name)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(version) for version in versions], indent=2))
        return
    for version in versions:
        made = datetime.fromtimestamp(version.created / 1000, UTC).strftime("%Y-%m-%d %H:%M")
        aliases = " ".join(f"@{alias}" for alias in version.aliases)
        typer.echo(f"{version.name} version {version.version} {aliases}".rstrip())
        typer.echo(f"  made   {made} UTC by MLflow run {version.run_id}")
        typer.echo(f"  score  {float(version.tags['penstock.bits_per_byte']):.4f} bits per byte")
        typer.echo(f"  why    {version.description}")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Let a registered model continue a text."""
    check_mlflow_answers()
    from pipelines.evaluation.generate import generate as continue_text
    from pipelines.tracking import registry

    name, _, which = model.partition("@")
    folder = registry.download(name, which or registry.CHAMPION)
    (text,) = continue_text(folder, [prompt], tokens, temperature=temperature, seed=seed)
    if as_json:
        typer.echo(json.dumps({"model": model, "prompt": prompt, "continuation": text}))
    else:
        typer.echo(prompt + text)


def check_mlflow_answers() -> None:
    """Ask before MLflow's client does, which tries for 13 s and then raises a page of text."""
    import httpx

    url = load_settings().mlflow_url
    if not url.startswith("http://"):  # how to reach one over https is in settings of MLflow's own
        return
    try:
        httpx.get(f"{url}/health", timeout=_ANSWER_WITHIN_S)
    except httpx.TransportError as error:
        raise UserError(f"no MLflow answers at {url} ({error}); `penstock up` starts it") from None

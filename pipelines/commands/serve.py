"""`penstock serve`: serve a registered model at an OpenAI-compatible endpoint."""

import signal
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from pipelines.serving.following_engine import FollowingEngine


class Engine(StrEnum):
    """The values of the option `--engine`."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    engine: Annotated[
        Engine, typer.Option(help="The server; vllm must be on PATH.")
    ] = Engine.TRANSFORMERS,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="NAME@WHICH",
            help="Also send each request to this model, and only compare its answers.",
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients until Ctrl-C, which waits for the answers under way.

    When an alias moves, the endpoint loads the new version.
    """
    check_mlflow_answers()
    import asyncio

    from pipelines.core.log import set_up_logging
    from pipelines.platform.secrets import serve_token, serve_token_path
    from pipelines.serving.endpoint import Endpoint, endpoint_server

    settings = load_settings()
    set_up_logging()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)  # while models load; the server drains on SIGTERM
    wanted = (model, shadow) if shadow else (model,)
    engines = asyncio.run(_ready(wanted, settings, engine))  # a model's error ends the command here
    try:
        first, *second = engines
        token = serve_token(settings)  # made now, if there is none: the next lines name its file
        typer.echo(f"{first.now.name}@{first.now.version} on http://{host}:{port}/v1")
        typer.echo(f"API key in {serve_token_path(settings)}")
        endpoint = Endpoint(first, token, *second)
        with suppress(KeyboardInterrupt):  # which the server raises again once it has ended
            endpoint_server(endpoint.app, host, port).run()
    finally:  # a second Ctrl-C ends the server at once
        for each in engines:
            each.stop()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _ready(
    models: Iterable[str], settings: Settings, engine: Engine
) -> "list[FollowingEngine]":
    import asyncio

    return await asyncio.gather(*(_following(each, settings, engine) for each in models))


async def _following(model: str, settings: Settings, engine: Engine) -> "FollowingEngine":
    """Start and await the engine of a model's version, by an alias or a number."""
    from pipelines.registry import registry
    from pipelines.serving.following_engine import FollowingEngine, ready_engine
    from pipelines.serving.serving_engine import SERVING, start_engine
    from pipelines.serving.serving_engine import Engine as Running

    name, _, which = model.partition("@")

    def latest() -> int:
        return registry.find(name, which or registry.CHAMPION).version

    def start(version: int) -> Running:
        folder = registry.download(name, str(version))
        return start_engine(name, version, folder, settings.home / SERVING, engine.value)

    version = latest()
    typer.echo(f"loading {name}@{version}", err=True)
    return FollowingEngine(await ready_engine(start, version), latest, start)

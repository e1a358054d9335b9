"""`penstock serve`: serve a registered model at an OpenAI-compatible endpoint."""

from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer

from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.core.settings import load_settings


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
) -> None:
    """Serve a model to OpenAI clients until Ctrl-C.

    When an alias moves, the endpoint loads the new version.
    """
    check_mlflow_answers()
    import asyncio

    from pipelines.platform.secrets import serve_token, serve_token_path
    from pipelines.registry import registry
    from pipelines.serving.endpoint import Endpoint, endpoint_server, ready_engine
    from pipelines.serving.serving_engine import SERVING, start_engine
    from pipelines.serving.serving_engine import Engine as Running

    settings = load_settings()
    name, _, which = model.partition("@")
    which = which or registry.CHAMPION

    def latest() -> int:
        return registry.find(name, which).version

    def start(version: int) -> Running:
        folder = registry.download(name, str(version))
        return start_engine(name, version, folder, settings.home / SERVING, engine.value)

    version = latest()
    typer.echo(f"loading {name}@{version}", err=True)
    first = asyncio.run(ready_engine(start, version))  # an error of the model ends the command here
    token = serve_token(settings)  # made now, if there is none: the next lines name its file
    typer.echo(f"{name}@{version} on http://{host}:{port}/v1")
    typer.echo(f"API key in {serve_token_path(settings)}")
    endpoint = Endpoint(first, latest, start, token)
    with suppress(KeyboardInterrupt):  # which the server raises again once it has ended
        endpoint_server(endpoint.app, host, port).run()

"""`penstock serve`: a registered model behind an OpenAI-compatible endpoint."""

from typing import Annotated

import typer

from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.core.settings import load_settings


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Answer OpenAI's clients with a model, until Ctrl-C; an alias is followed where it moves."""
    check_mlflow_answers()
    import uvicorn

    from pipelines.services.secrets import serve_token, serve_token_path
    from pipelines.services.serving import Endpoint, start_engine
    from pipelines.tracking import registry

    settings = load_settings()
    name, _, which = model.partition("@")
    which = which or registry.CHAMPION
    home = settings.home / "serving"
    home.mkdir(parents=True, exist_ok=True)
    found = registry.find(name, which)  # a wrong name ends here, in one line
    endpoint = Endpoint(
        name,
        latest=lambda: registry.find(name, which).version,
        start=lambda version: start_engine(
            name, version, registry.download(name, str(version)), home
        ),
        token=serve_token(settings),
    )
    typer.echo(f"{name}@{found.version} on http://{host}:{port}/v1")
    typer.echo(f"API key in {serve_token_path(settings)}")
    uvicorn.run(endpoint.app, host=host, port=port, log_level="warning")

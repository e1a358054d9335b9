"""`penstock serve --engine vllm` of the same folder, registered and followed in MLflow."""

import os
import sys
from pathlib import Path
from typing import Any

from pipelines.core.machine import free_port
from pipelines.core.settings import load_settings
from pipelines.platform.secrets import serve_token
from pipelines.registry.registration import register
from pipelines.registry.signing import ensure_key_pair
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.streaming_load import round_of, start_server

NAME = "served"


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    os.environ["PENSTOCK_HOME"] = str(folder / "home")
    os.environ["MLFLOW_TRACKING_URI"] = options["mlflow"]
    settings = load_settings()
    ensure_key_pair(settings.signing_key)
    version = register([folder / "model"], NAME, None, {MODEL_HASH_TAG: "one"}, "of a benchmark")
    port = free_port()
    command = [Path(sys.prefix) / "bin" / "penstock", "serve", version.label]
    command += ["--engine", "vllm", "--port", str(port)]
    path = f"{options['bin']}{os.pathsep}{os.environ['PATH']}"
    start_server(
        command, os.environ | options["environ"] | {"PATH": path}, folder / "ours.log", port
    )
    return round_of(port, NAME, serve_token(settings), options)


if __name__ == "__main__":
    serve(prepare)

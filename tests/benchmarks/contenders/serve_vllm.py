"""Bare `vllm serve` of the folder, with the options that `penstock serve` gives it."""

import os
from pathlib import Path
from typing import Any

from pipelines.core.machine import free_port
from pipelines.models.model_folder import stated_type
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.streaming_load import round_of, start_server


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    model, port = folder / "model", free_port()
    command = [Path(options["bin"]) / "vllm", "serve", model, "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", stated_type(model)]
    start_server(command, os.environ | options["environ"], folder / "vllm.log", port)
    return round_of(port, "model", "none", options)


if __name__ == "__main__":
    serve(prepare)

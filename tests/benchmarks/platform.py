"""What the platform costs the training loop: tokens a second, in the second half of the steps.

`penstock` is the train job as Airflow submits it: Ray Train, points sent to an MLflow server, the
node's load recorded, a checkpoint every 50 steps. `alone` is the same Trainer by `torchrun`'s door,
with neither; it writes its last checkpoint only. `beside Ray` is `alone` while a Ray is up that has
nothing to do. One process with one thread each, so that Ray's and MLflow's own processes have
another core. All count from their progress file, and so with all that happens between two steps.
The first half, in which MLflow's client is imported beside the steps, once a run and for a second
or two, counts as starting up.
"""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.core.storage import write_text
from pipelines.recipe.recipe_files import dump_yaml, parse_recipe
from tests.benchmarks.harness import Benchmark, Contender, Demand

RECIPE = {
    "name": "platform",
    "data": {
        "source": {"kind": "stdlib", "max_documents": 60},
        "tokenizer": {"kind": "byte"},
        "sequence_length": 128,
    },
    "model": {"preset": "llama-1m"},
    "train": {
        "steps": 300,
        "warmup_steps": 10,
        "micro_batch_size": 8,
        "global_batch_size": 8,
        "log_every": 10,
    },
    "resources": {"workers": 1},
}


def make_data(folder: Path) -> dict[str, Any]:
    """The recipe; its data are the standard library's files."""
    recipe = parse_recipe(RECIPE)
    write_text(folder / "recipe.yaml", dump_yaml(recipe))
    train, data = recipe.train, recipe.data
    return {"tokens_per_step": train.global_batch_size * data.sequence_length, "threads": 1}


@contextmanager
def mlflow_server(folder: Path) -> Iterator[dict[str, Any]]:
    """A tracking server for as long as the benchmark runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{folder / 'mlflow.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    with (folder / "mlflow.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--backend-store-uri", store], cwd=folder, stdout=log, stderr=log
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", server)
        yield {"mlflow": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end and server.poll() is None:
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the MLflow server did not start; see mlflow.log beside the data")


BENCHMARK = Benchmark(
    name="platform",
    unit="tokens",
    contenders=[
        Contender(
            "penstock",
            "platform_job",
            options={"module": "ray_jobs.train", "ray": True, "checkpoint_every": 50},
        ),
        Contender(
            "alone",
            "platform_job",
            options={"module": "pipelines.training", "ray": False, "checkpoint_every": 100_000},
        ),
        Contender(
            "beside Ray",
            "platform_job",
            options={"module": "pipelines.training", "ray": True, "checkpoint_every": 100_000},
        ),
    ],
    demands=[Demand(over="alone", ratio=0.97), Demand(over="beside Ray", ratio=0.97)],
    make_data=make_data,
    service=mlflow_server,
    warm_up=0,  # each round is a process of its own
)

"""A real Triton Inference Server (the one in the wheel `nvidia-pytriton`), and its answers."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx

from pipelines.core.machine import free_port
from tests.serving.models import PROMPTS, TOKENS, greedy
from tests.serving.servers import START_S, environment, running

# Longer and shorter than Mistral's window, and each with an answer of its own length.
ASKED = [(PROMPTS[0], 40), (PROMPTS[1], 1), (PROMPTS[2], TOKENS), ("Water " * 12, 9)]


class Triton:
    """A running server and its model repository."""

    def __init__(self, http: httpx.Client, grpc: str, repository: Path) -> None:
        self.http = http
        self.grpc = grpc  # its address
        self.repository = repository

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(f"/v2/{path}", json=body or {})

    def load(self, name: str) -> None:
        answer = self.post(f"repository/models/{name}/load")
        assert answer.is_success, answer.text

    def inputs(self, texts: Sequence[str], tokens: Sequence[int] | None) -> dict[str, Any]:
        """A plain request of several texts."""
        shape = [len(texts), 1]
        inputs: list[dict[str, Any]] = [
            {"name": "text_input", "datatype": "BYTES", "shape": shape, "data": texts}
        ]
        if tokens is not None:
            inputs.append(
                {"name": "max_tokens", "datatype": "INT32", "shape": shape, "data": tokens}
            )
        return {"inputs": inputs}

    def infer(self, name: str, texts: Sequence[str], tokens: Sequence[int] | None) -> list[str]:
        """What a request of several texts is answered."""
        answer = self.post(f"models/{name}/infer", self.inputs(texts, tokens))
        assert answer.is_success, answer.text
        (output,) = answer.json()["outputs"]
        assert output["shape"] == [len(texts), 1]
        return list(output["data"])

    def generate(self, name: str, body: dict[str, Any]) -> httpx.Response:
        return self.post(f"models/{name}/generate", body)

    def answers_until(self, name: str, body: dict[str, Any], expected: dict[str, str]) -> list[Any]:
        """What it answers to a request before it first gives what is expected."""
        said: list[Any] = []
        limit = monotonic() + START_S
        while (answer := self.generate(name, body).json()) != expected:
            assert monotonic() < limit, answer
            said.append(answer)
            sleep(0.2)
        return said

    def batches(self, name: str) -> int:
        (stats,) = self.http.get(f"/v2/models/{name}/stats").json()["model_stats"]
        return int(stats["execution_count"])


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Triton]:
    made = environment("triton")
    (packages,) = made.glob("lib/python3.*/site-packages")
    server = packages / "pytriton" / "tritonserver"
    repository = folder / "repository"
    repository.mkdir(exist_ok=True)
    port, grpc_port = free_port(), free_port()
    command: list[str | Path] = [
        server / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={server / 'backends'}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--allow-metrics=false",
        *options,
    ]
    # Its Python is the one that stands first on PATH.
    environ = {
        "PATH": f"{made / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(made / "libpython"),
    }
    url = f"http://127.0.0.1:{port}"
    with (
        running(command, f"{url}/v2/health/ready", folder / "log", environ),
        httpx.Client(base_url=url, trust_env=False, timeout=120) as http,
    ):
        yield Triton(http, f"127.0.0.1:{grpc_port}", repository)


def answers(folder: Path, asked: Sequence[tuple[str | list[Any], int]]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = greedy(folder, [prompt for prompt, _ in asked], max(most for _, most in asked))
    return [
        tokenizer.decode(tokens[:most], skip_special_tokens=True)
        for tokens, (_, most) in zip(made, asked, strict=True)
    ]

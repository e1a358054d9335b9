"""serve: `penstock serve --engine vllm` beside bare `vllm serve`, for the same folder.

Eight clients ask for streamed completions, each again as soon as it is answered. Compared are
answers a second, and the median time to an answer's first token. Both run vLLM from
the environment of the tests of real servers, with the same options and without compiling. The model
is small, so that what stands between client and engine weighs much; server and clients share the
machine's cores.
"""

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.platform import mlflow_server
from tests.serving.servers import KEPT, VLLM_ON_CPU

VOCABULARY, CONTEXT = 1024, 512
LEAST = 0.95  # of the speed of bare vLLM


def make_data(folder: Path) -> dict[str, Any]:
    """Write a model with random weights, and a tokenizer of Python's library."""
    from pipelines.core.storage import write_json, write_text
    from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe
    from pipelines.models.presets import preset
    from pipelines.models.pretrained import save_pretrained
    from pipelines.models.transformer import Transformer

    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer = train_bpe(
        [path.read_text(encoding="utf-8", errors="replace") for path in paths], VOCABULARY
    )
    model = Transformer(preset("llama-10m").sized(VOCABULARY, CONTEXT))
    model.init_weights(0)
    save_tokenizer(tokenizer, folder / "model")
    save_pretrained(model, folder / "model", end_of_text=tokenizer.token_to_id("<|endoftext|>"))
    write_text(folder / "model" / "README.md", "# a model\n")
    write_json(folder / "model" / "lineage.json", {})
    return {
        "clients": 8,
        "requests": 16,
        "tokens": 32,
        "prompt": "def copy(source, target):\n    return",
    }


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, Any]]:
    """Where vLLM is, and a registry."""
    place = KEPT / "vllm"
    if not (place / "installed").is_file():
        raise SystemExit(f"vLLM is not in {KEPT}: bash tests/serving/install.sh installs it")
    with mlflow_server(folder) as mlflow:
        changed = {key: VLLM_ON_CPU[key] for key in VLLM_ON_CPU if key.startswith(("VLLM", "HF_"))}
        yield mlflow | {"bin": str(_command(place, folder / "bin").parent), "environ": changed}


def _command(place: Path, folder: Path) -> Path:
    """Write a command `vllm` that does not compile, which takes minutes on two cores."""
    folder.mkdir(exist_ok=True)
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\nexec "{place}/bin/vllm" "$@" --enforce-eager\n')
    path.chmod(0o755)
    return path


BENCHMARK = Benchmark(
    name="serve",
    unit="answers",
    contenders=[Contender("penstock", "serve_ours"), Contender("vllm", "serve_vllm")],
    demands=[
        Demand(over="vllm", ratio=LEAST),
        Demand(over="vllm", ratio=round(1 / LEAST, 3), figure="first token ms"),
    ],
    make_data=make_data,
    service=servers,
)

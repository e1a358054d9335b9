"""Ours: `Encoder.encode`, as a preprocess task calls it, in two threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.data.tokens.tokenizer import Encoder
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.tokenize_check import check, documents

BATCH = 64  # documents


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts = documents(folder)
    encoder = Encoder(folder / "tokenizer")
    pool = ThreadPoolExecutor(2)
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    check(options, (ids[:-1] for batch in pool.map(encoder.encode, batches) for ids in batch))

    def run_round() -> tuple[float, dict[str, Any]]:
        tokens = sum(len(ids) - 1 for batch in pool.map(encoder.encode, batches) for ids in batch)
        return options["bytes"] / 1e6, {"tokens": tokens, "engine": encoder.engine}

    return run_round


if __name__ == "__main__":
    serve(prepare)

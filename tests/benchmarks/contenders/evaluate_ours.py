"""Ours: `score_documents` on a folder, as an evaluation task calls it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.evaluation.perplexity import score_documents
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.evaluate_texts import read_texts, sums


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts = read_texts(folder, options)
    documents = pa.table({"doc_id": list(map(str, range(len(texts)))), "text": texts})

    def run_round() -> tuple[float, dict[str, Any]]:
        nats = score_documents(folder / options["model"], documents, stride=1.0)["nats"].to_pylist()
        return len(texts), sums(nats, texts, options)

    return run_round


if __name__ == "__main__":
    serve(prepare)

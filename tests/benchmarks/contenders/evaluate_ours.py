"""Ours: `score_documents` on a folder, as an evaluation task calls it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.evaluation.perplexity import score_documents
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts = json.loads((folder / "documents.json").read_text())[: options["documents"]]
    documents = pa.table({"doc_id": list(map(str, range(len(texts)))), "text": texts})

    def run_round() -> tuple[float, dict[str, Any]]:
        nats = score_documents(folder / options["model"], documents, stride=1.0)["nats"].to_pylist()
        short = [
            each for each, text in zip(nats, texts, strict=True) if len(text) <= options["short"]
        ]
        return len(texts), {"nats of short": math.fsum(short), "nats": math.fsum(nats)}

    return run_round


if __name__ == "__main__":
    serve(prepare)

"""Ours as the stage runs it, but in one process: key files by the block, edges, what to drop.

A document's SHA-256, by which exact copies are found, is its name since it was read: not timed.
"""

import hashlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipelines.data.duplicates.deduplication import (
    Duplicates,
    find_duplicates,
    match_partition,
    partitions_for,
    write_keys,
)
from pipelines.recipe.cleaning_section import Dedup
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.dedup_truth import read_planted, read_texts, score

_BLOCK = 5000  # documents: some 6 MB
_LEAST_F1 = 0.95


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts, planted = read_texts(folder), read_planted(folder)
    megabytes = sum(map(len, texts)) / 1e6
    doc_ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    dedup = Dedup(kind="minhash", **options)

    def run_round() -> tuple[float, dict[str, Any]]:
        with TemporaryDirectory() as name:
            began = time.perf_counter()
            files = []
            for start in range(0, len(texts), _BLOCK):
                files.append(Path(name) / f"keys-{start}")
                block = slice(start, start + _BLOCK)
                write_keys(files[-1], doc_ids[block], texts[block], dedup)
            signed = time.perf_counter()
            duplicates = _match(files, len(texts), dedup, Path(name))
            matched = time.perf_counter()
        quality = score(planted, duplicates.numbers.tolist())
        if quality["f1"] < _LEAST_F1:
            raise SystemExit(f"F1 is {quality['f1']:.3f}, less than {_LEAST_F1}")
        return len(texts), {
            **quality,
            "signing_documents_per_second": len(texts) / (signed - began),
            "signing_megabytes_per_second": megabytes / (signed - began),
            "matching_documents_per_second": len(texts) / (matched - signed),
        }

    return run_round


def _match(files: list[Path], documents: int, dedup: Dedup, folder: Path) -> Duplicates:
    partitions = partitions_for(documents, dedup)
    return find_duplicates(
        [
            match_partition(
                partition, partitions=partitions, key_files=files, dedup=dedup, folder=folder
            )
            for partition in range(partitions)
        ]
    )


if __name__ == "__main__":
    serve(prepare)

"""Tokens delivered as batches: int64 inputs and targets, 16 x 1024 each, on the CPU.

All contenders draw random samples of the same 500 million uint16 ids (1 GB). Cold: the page cache
is emptied of every file before each round.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.run.records import Shard, Split
from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.page_cache import empty_cache

VOCABULARY = 50_257
SHARDS, SHARD_TOKENS, DOCUMENT_TOKENS = 10, 50_000_000, 1000
BATCH, SEQUENCE = 16, 1024


def make_data(folder: Path) -> dict[str, Any]:
    """Random ids as token shards of Penstock's default size, and as one plain file."""
    rng = np.random.default_rng(0)
    shards = []
    with (folder / "train.bin").open("wb") as plain:
        for number in range(SHARDS):
            ids = rng.integers(0, VOCABULARY, SHARD_TOKENS, dtype=np.uint16)
            ids.tofile(plain)
            shards.append(write_shard(folder / f"train-{number:05d}", ids))
    tokens = SHARDS * SHARD_TOKENS
    split = Split(
        documents=tokens // DOCUMENT_TOKENS, bytes=tokens, tokens=tokens, shards=tuple(shards)
    )
    os.sync()  # only clean pages can be dropped from the cache
    return {
        "split": split.model_dump(mode="json"),
        "batch": BATCH,
        "sequence": SEQUENCE,
        "tokens": tokens,
    }


def write_split(folder: Path, tokens: int, vocabulary: int) -> Split:
    """At least so many random ids as one shard: what they are changes no step's time."""
    tokens = -(-tokens // DOCUMENT_TOKENS) * DOCUMENT_TOKENS
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens, dtype=np.uint16)
    shard = write_shard(folder / "train-00000", ids)
    return Split(documents=tokens // DOCUMENT_TOKENS, bytes=tokens, tokens=tokens, shards=(shard,))


def write_shard(prefix: Path, ids: np.ndarray) -> Shard:
    """One shard, of documents of one length."""
    writer = ShardWriter(prefix, VOCABULARY)
    writer.add(ids, np.full(len(ids) // DOCUMENT_TOKENS, DOCUMENT_TOKENS))
    return writer.close()


BENCHMARK = Benchmark(
    name="loader",
    unit="tokens",
    contenders=[
        Contender("penstock", "loader_ours"),
        Contender("nanogpt", "loader_nanogpt", venv="bench"),
        Contender("dataloader", "loader_dataloader", venv="bench"),
        Contender("mosaicml-streaming", "loader_streaming", venv="bench"),
    ],
    demands=[
        Demand(over="nanogpt", ratio=1.5),
        Demand(over="dataloader", ratio=3),
        Demand(over="mosaicml-streaming", ratio=3),
    ],
    make_data=make_data,
    cases={"warm": {"cold": False, "batches": 4000}, "cold": {"cold": True, "batches": 1000}},
    before_round=empty_cache,
)

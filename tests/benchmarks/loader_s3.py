"""Batches out of an S3 bucket, 16 x 1024 tokens each, whose shards no cache has room for.

The server is local and answers each request after 20 ms, as S3 in the same region does. Ours reads
ahead by parallel range requests; the baseline asks boto3 for one sample after the other. Both read
random samples of the same shards. A round is 10 batches, and nothing is read ahead over its end.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.loading.sources.s3_objects import object_path
from pipelines.run.records import Split
from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.loader import BATCH, DOCUMENT_TOKENS, SEQUENCE, VOCABULARY, write_shard

SHARDS, SHARD_TOKENS = 2, 20_000_000
LATENCY = 0.02  # seconds
BATCHES = 10
REMOTE = "remote"


def make_data(folder: Path) -> dict[str, Any]:
    """Two shards, laid down by their hashes as DVC does it."""
    rng = np.random.default_rng(0)
    shards = []
    for number in range(SHARDS):
        ids = rng.integers(0, VOCABULARY, SHARD_TOKENS, dtype=np.uint16)
        shard = write_shard(folder / f"train-{number:05d}", ids)
        shards.append(shard)
        path = folder / shard.path
        for digest, source in ((shard.md5, path), (shard.index_md5, path.with_suffix(".idx"))):
            target = folder / REMOTE / object_path(digest)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
    tokens = SHARDS * SHARD_TOKENS
    split = Split(
        documents=tokens // DOCUMENT_TOKENS, bytes=tokens, tokens=tokens, shards=tuple(shards)
    )
    return {
        "split": split.model_dump(mode="json"),
        "keys": [object_path(shard.md5) for shard in shards],
        "shard_tokens": SHARD_TOKENS,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "batches": BATCHES,
        "latency_seconds": LATENCY,
    }


@contextmanager
def serve_s3(folder: Path) -> Iterator[dict[str, Any]]:
    """The server, in a process of its own."""
    module = "tests.benchmarks.contenders.slow_s3"
    command = [sys.executable, "-m", module, str(folder / REMOTE), str(LATENCY)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield {"endpoint": f"http://127.0.0.1:{int(server.stdout.readline())}"}
        finally:
            server.stdin.close()


BENCHMARK = Benchmark(
    name="loader_s3",
    unit="tokens",
    contenders=[
        Contender("penstock", "loader_s3_ours"),
        Contender("boto3", "loader_s3_boto3", venv="bench"),
    ],
    demands=[Demand(over="boto3", ratio=3)],
    make_data=make_data,
    service=serve_s3,
)

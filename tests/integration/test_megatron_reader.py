"""Our token shards and Megatron's own indexed dataset: each reads what the other writes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.core.settings import PROJECT
from pipelines.data.tokens.assembly import best_fit, write_packed
from pipelines.data.tokens.token_shards import ShardWriter, bin_path, idx_path
from tests.indexed_dataset import IndexedDataset

PYTHON = PROJECT / ".venv-bench" / "bin" / "python"
PEER = Path(__file__).with_name("megatron_peer.py")
END = 0
CAPACITY = 33
VOCABULARIES = {"uint16": 50_257, "int32": 128_256}

pytestmark = pytest.mark.parametrize("dtype", VOCABULARIES)


def documents(dtype: str) -> list[list[int]]:
    """Of 1 to 60 tokens, each with its end."""
    random = np.random.default_rng(0)
    return [
        [*random.integers(1, VOCABULARIES[dtype], size).tolist(), END]
        for size in random.integers(0, 60, 200)
    ]


def written(prefix: Path, dtype: str, capacity: int | None) -> Path:
    texts = documents(dtype)
    ids, sizes = np.concatenate([*map(np.array, texts)]), np.array([*map(len, texts)])
    writer = ShardWriter(prefix, VOCABULARIES[dtype], masked=capacity is not None)
    if capacity is None:
        writer.add(ids, sizes)
    else:
        write_packed(writer, best_fit(sizes, capacity), ids, sizes, None, END)
    writer.close()
    return prefix


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What Megatron finds in our shards, by their names, and the folder of those of the peers."""
    assert PYTHON.exists(), "this test needs Megatron: make bench-env"
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    prefixes = [
        written(ours / f"{name}-{dtype}", dtype, capacity)
        for name, capacity in (("concat", None), ("packed", CAPACITY))
        for dtype in VOCABULARIES
    ]
    asked = {
        "read": [str(prefix) for prefix in prefixes],
        "folder": str(theirs),
        "write": {dtype: [*map(in_sequences, documents(dtype))] for dtype in VOCABULARIES},
    }
    done = subprocess.run([PYTHON, PEER], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {prefix.name: each for prefix, each in zip(prefixes, found, strict=True)}, theirs


@pytest.fixture
def read_by_megatron(exchanged: tuple[dict[str, Any], Path]) -> dict[str, Any]:
    return exchanged[0]


@pytest.fixture
def written_by_peers(exchanged: tuple[dict[str, Any], Path]) -> Path:
    return exchanged[1]


def in_sequences(ids: list[int]) -> list[list[int]]:
    return [ids[:5], ids[5:]] if len(ids) > 5 else [ids]


def test_megatron_reads_our_shards(dtype: str, read_by_megatron: dict[str, Any]) -> None:
    texts = documents(dtype)
    assert read_by_megatron[f"concat-{dtype}"] == {
        "dtype": dtype,
        "sizes": [len(ids) for ids in texts],
        "documents": list(range(len(texts) + 1)),
        "ids": texts,
    }


def test_megatron_reads_our_packed_shards(dtype: str, read_by_megatron: dict[str, Any]) -> None:
    found = read_by_megatron[f"packed-{dtype}"]
    assert found["dtype"] == dtype
    samples = [
        found["sizes"][first:last]
        for first, last in zip(found["documents"], found["documents"][1:], strict=False)
    ]
    assert all(sum(sizes) == CAPACITY for sizes in samples)
    # Every document, or each piece of one that is too long, is a sequence; the rest is padding.
    pieces = [
        ids[start : start + CAPACITY]
        for ids in documents(dtype)
        for start in range(0, len(ids), CAPACITY)
    ]
    sequences = list(found["ids"])
    for piece in pieces:
        sequences.remove(piece)
    assert all(set(ids) == {END} for ids in sequences)
    assert len(sequences) <= len(samples)


def test_we_read_what_megatron_writes(dtype: str, written_by_peers: Path) -> None:
    dataset = IndexedDataset(written_by_peers / f"megatron-{dtype}")
    texts = documents(dtype)
    assert [dataset.document(number).tolist() for number in range(len(dataset))] == texts
    assert dataset.tokens.dtype == dtype
    sizes = [len(sequence) for ids in texts for sequence in in_sequences(ids)]
    assert np.diff(dataset.sequence_offsets).tolist() == sizes


def test_datatrove_writes_the_same_bytes(
    dtype: str, written_by_peers: Path, tmp_path: Path
) -> None:
    ours, theirs = written(tmp_path / "x", dtype, None), written_by_peers / f"datatrove-{dtype}"
    for path in (bin_path, idx_path):
        assert path(ours).read_bytes() == path(theirs).read_bytes()

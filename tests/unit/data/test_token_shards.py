import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.data.token_shards import (
    IndexedDataset,
    RollingShardWriter,
    ShardWriter,
    bin_path,
    idx_path,
)


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> IndexedDataset:
    writer = ShardWriter(prefix, vocab_size)
    for ids in documents:
        writer.add(np.array(ids, np.int32))
    writer.close()
    return IndexedDataset(prefix)


def independent_read(prefix: Path) -> tuple[int, list[int], list[int], list[int], list[list[int]]]:
    """Megatron's layout, read with struct alone: dtype code, sizes, pointers, documents, ids."""
    with idx_path(prefix).open("rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        assert struct.unpack("<Q", file.read(8)) == (1,)
        (code,) = struct.unpack("<B", file.read(1))
        (sequences,) = struct.unpack("<Q", file.read(8))
        (documents,) = struct.unpack("<Q", file.read(8))
        sizes = list(struct.unpack(f"<{sequences}i", file.read(4 * sequences)))
        pointers = list(struct.unpack(f"<{sequences}q", file.read(8 * sequences)))
        indices = list(struct.unpack(f"<{documents}q", file.read(8 * documents)))
        assert file.read() == b""
    raw = bin_path(prefix).read_bytes()
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    ids = [
        list(struct.unpack(f"<{size}{letter}", raw[start : start + size * width]))
        for size, start in zip(sizes, pointers, strict=True)
    ]
    return code, sizes, pointers, indices, ids


@pytest.mark.parametrize(
    ("vocab_size", "code", "width"), [(65499, 8, 2), (65500, 4, 4), (128_256, 4, 4)]
)
def test_the_layout_is_megatrons(tmp_path: Path, vocab_size: int, code: int, width: int) -> None:
    documents = [[5, 6, 7, 0], [0], [65_000, 1, 0]]
    write(tmp_path / "shard", documents, vocab_size)
    assert independent_read(tmp_path / "shard") == (
        code,
        [4, 1, 3],
        [0, 4 * width, 5 * width],
        [0, 1, 2, 3],
        documents,
    )


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_000), min_size=1, max_size=9), max_size=9),
    vocab_size=st.sampled_from([65_001, 100_000]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    dataset = write(tmp_path_factory.mktemp("shard") / "x", documents, vocab_size)
    assert [list(dataset.document(i)) for i in range(len(dataset))] == documents
    assert list(dataset.tokens) == [token for ids in documents for token in ids]
    assert dataset.document_offsets.dtype == np.int64
    assert dataset.document_offsets[-1] == len(dataset.tokens)


def test_a_shard_ends_before_it_exceeds_its_tokens(tmp_path: Path) -> None:
    writer = RollingShardWriter(tmp_path, "train", vocab_size=300, shard_tokens=5)
    for length in (3, 2, 1, 9, 5):  # 3 + 2 fill one exactly; 9 is too long for any
        writer.add(np.arange(length, dtype=np.uint16))
    writer.close()
    assert {prefix.name: tokens for prefix, tokens in writer.tokens.items()} == {
        "train-00000": 5,
        "train-00001": 1,
        "train-00002": 9,
        "train-00003": 5,
    }
    assert [len(IndexedDataset(prefix)) for prefix in writer.tokens] == [2, 1, 1, 1]


def test_a_cut_off_bin_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    bin_path(tmp_path / "x").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"x\.bin: 2 bytes, but its index counts 3 tokens"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("raw", [b"", b"not an index" * 10])
def test_another_files_index_is_refused(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path / "x", [[1]])
    idx_path(tmp_path / "x").write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.idx: .*Megatron index"):
        IndexedDataset(tmp_path / "x")

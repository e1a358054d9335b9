import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.storage import md5
from pipelines.data.tokens.token_shards import (
    ShardIndex,
    ShardWriter,
    bin_path,
    idx_path,
    mask_path,
)
from pipelines.run.records import Shard
from tests.indexed_dataset import IndexedDataset


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


@settings(max_examples=30)
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


def test_blocks_of_documents_make_the_same_shard_as_single_ones(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    write(tmp_path / "single", documents)
    writer = ShardWriter(tmp_path / "blocks", 1000)
    writer.add(np.array([1, 2, 3, 4], np.uint16), np.array([3, 1], np.int32))
    writer.add(np.array([5, 6, 7, 8, 9, 10], np.int64), np.array([2, 4]))
    writer.close()
    for path in (bin_path, idx_path):
        assert path(tmp_path / "blocks").read_bytes() == path(tmp_path / "single").read_bytes()


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", 1000)
    writer.add(np.arange(9), np.array([2, 3, 4]), sequences=np.array([2, 1]))
    writer.close()
    assert independent_read(tmp_path / "x")[1:4] == ([2, 3, 4], [0, 4, 10], [0, 2, 3])
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.sequence_offsets.tolist() == [0, 2, 5, 9]
    assert dataset.document_offsets.tolist() == [0, 5, 9]
    assert dataset.document(1).tolist() == [5, 6, 7, 8]
    assert dataset.mask is None


def test_a_loss_mask_lies_beside_the_tokens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", 1000, masked=True)
    writer.add(np.arange(3), mask=np.array([0, 1, 1], np.uint8))
    writer.add(np.arange(2), np.array([1, 1]), np.array([0, 1], np.uint8))
    shard = writer.close()
    assert mask_path(tmp_path / "x").read_bytes() == b"\0\1\1\0\1"
    assert shard.mask_md5 == md5(mask_path(tmp_path / "x"))
    mask = IndexedDataset(tmp_path / "x").mask
    assert mask is not None
    assert mask.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("vocab_size", [1000, 100_000])
def test_the_record_says_what_is_on_disk(tmp_path: Path, vocab_size: int) -> None:
    writer = ShardWriter(tmp_path / "train-00000", vocab_size)
    writer.add(np.arange(600))
    shard = writer.close()
    assert shard == Shard(
        path="train-00000.bin",
        md5=md5(tmp_path / "train-00000.bin"),
        index_md5=md5(tmp_path / "train-00000.idx"),
        bytes=(tmp_path / "train-00000.bin").stat().st_size,
        tokens=600,
    )


@pytest.mark.parametrize(
    ("masked", "mask", "sizes", "sequences", "message"),
    [
        (False, None, [2, 2], None, "do not add up"),
        (False, None, [2, 1], [1], "do not add up"),
        (False, [1, 1, 1], [3], None, "another none"),
        (True, None, [3], None, "needs one byte"),
        (True, [1, 1], [3], None, "needs one byte"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    masked: bool,
    mask: list[int] | None,
    sizes: list[int],
    sequences: list[int] | None,
    message: str,
) -> None:
    writer = ShardWriter(tmp_path / "x", 1000, masked=masked)
    with pytest.raises(ValueError, match=message):
        writer.add(
            np.arange(3),
            np.array(sizes),
            None if mask is None else np.array(mask, np.uint8),
            None if sequences is None else np.array(sequences),
        )


@pytest.mark.parametrize("raw", [b"", b"not an index" * 10])
def test_another_files_index_is_refused(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path / "x", [[1]])
    idx_path(tmp_path / "x").write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.idx: .*Megatron index"):
        ShardIndex(idx_path(tmp_path / "x"))


def test_an_index_with_a_flipped_byte_is_read_or_refused(tmp_path: Path) -> None:
    """Never an array of as many numbers as a damaged header speaks of."""
    with_two = ShardWriter(tmp_path / "x", 300)
    with_two.add(np.arange(7), np.array([3, 4]))
    with_two.close()
    path = idx_path(tmp_path / "x")
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 0x81
        path.write_bytes(content)
        with suppress(ValueError):
            assert len(ShardIndex(path).document_offsets()) == 3

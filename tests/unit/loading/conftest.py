"""Shards of given tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pipelines.core.storage import md5
from pipelines.data.tokens.token_shards import MAGIC, VERSION, bin_path, idx_path, mask_path
from pipelines.run.records import Shard, Split

Documents = Sequence[Sequence[Sequence[int]]]  # a shard's: documents of sequences of token ids
WriteSplit = Callable[..., Split]


def write_shard(
    folder: Path, name: str, documents: Documents, mask: Sequence[int] | None, dtype: str
) -> Shard:
    """One shard, its index written byte for byte as Megatron's own writer lays it out."""
    prefix = folder / name
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(each) for each in sequences], "<i4")
    ids = np.array([token for each in sequences for token in each], dtype)
    ends = np.cumsum(sizes, dtype=np.int64) * ids.itemsize
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    ids.tofile(bin_path(prefix))
    code = {"<u2": 8, "<i4": 4}[dtype]
    header = MAGIC + VERSION.to_bytes(8, "little") + bytes([code])
    counts = np.array([len(sizes), len(firsts)], "<u8")
    pointers = (ends - sizes * ids.itemsize).astype("<i8")
    index = (header, counts.tobytes(), sizes.tobytes(), pointers.tobytes(), firsts.astype("<i8"))
    idx_path(prefix).write_bytes(b"".join(bytes(part) for part in index))
    if mask is not None:
        np.array(mask, np.uint8).tofile(mask_path(prefix))
    return Shard(
        path=bin_path(prefix).name,
        md5=md5(bin_path(prefix)),
        index_md5=md5(idx_path(prefix)),
        mask_md5=None if mask is None else md5(mask_path(prefix)),
        bytes=ids.nbytes,
        tokens=len(ids),
    )


@pytest.fixture
def write_split(tmp_path: Path) -> WriteSplit:
    """Write a split: `write_split([[[1, 2], [3]]])` is a shard, a document, two sequences."""

    def write(
        shards: Sequence[Documents],
        masks: Sequence[Sequence[int] | None] | None = None,
        dtype: str = "<u2",
        folder: Path = tmp_path,
    ) -> Split:
        written = tuple(
            write_shard(folder, f"train-{number:05d}", documents, mask, dtype)
            for number, (documents, mask) in enumerate(
                zip(shards, masks or [None] * len(shards), strict=True)
            )
        )
        tokens = sum(shard.tokens for shard in written)
        documents = sum(map(len, shards))
        return Split(documents=documents, bytes=tokens, tokens=tokens, shards=written)

    return write


@pytest.fixture
def random_split(write_split: WriteSplit) -> Split:
    """Three shards of one document each, 3000 random ids in all."""
    ids = np.random.default_rng(0).integers(0, 60_000, 3000)
    return write_split([[[part.tolist()]] for part in np.split(ids, [1000, 1700])])

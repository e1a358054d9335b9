"""Reads a shard of tokens as Megatron does, so that tests can compare what was written."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.data.tokens.token_shards import (
    Ids,
    Mask,
    ShardIndex,
    bin_path,
    idx_path,
    mask_path,
)


class IndexedDataset:
    """A shard, read through memory maps.

    Attributes:
        tokens: every id of the shard, shape [tokens], uint16 or int32.
        document_offsets: as of `ShardIndex`.
        sequence_offsets: as of `ShardIndex`; the same where documents are not packed.
        mask: 1 for each token that is predicted, uint8 [tokens]; None where there is no such file.

    Raises:
        ValueError: not an index of this format, or a file is not as long as the index says.
    """

    def __init__(self, prefix: Path) -> None:
        index = ShardIndex(idx_path(prefix))
        self.document_offsets = index.document_offsets()
        self.sequence_offsets = index.sequence_offsets()
        tokens = int(self.document_offsets[-1])
        self.tokens: Ids = _map(bin_path(prefix), index.dtype, tokens)
        mask = mask_path(prefix)
        self.mask: Mask | None = _map(mask, np.dtype(np.uint8), tokens) if mask.exists() else None

    def __len__(self) -> int:
        """Documents in the shard."""
        return len(self.document_offsets) - 1

    def document(self, index: int) -> Ids:
        """One document's ids, its end-of-document token included."""
        start, stop = self.document_offsets[index : index + 2]
        return self.tokens[start:stop]


def _map(path: Path, dtype: np.dtype[Any], tokens: int) -> npt.NDArray[Any]:
    size = path.stat().st_size
    if size != tokens * dtype.itemsize:
        raise ValueError(f"{path}: {size} bytes, but its index counts {tokens} tokens")
    if not tokens:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")

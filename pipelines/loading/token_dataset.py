"""Samples of a fixed length over the token shards of one split."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import UserError
from pipelines.core.records import Shard, Split
from pipelines.core.storage import md5
from pipelines.data.token_shards import IndexedDataset


class TokenDataset:
    """Sample i is `sequence_length + 1` tokens: its inputs, and each input's successor.

    Samples lie in a shard one behind the other and overlap by one token, so that every token but
    a shard's first is predicted. What is left at a shard's end, less than a sample, is not read.
    """

    def __init__(self, folder: Path, split: Split, sequence_length: int) -> None:
        """Check the content of each shard of `split`, then map it; paths are relative to `folder`.

        Raises:
            UserError: a shard is missing or damaged, or all together are not even one sample.
        """
        self.sequence_length = sequence_length
        for shard in split.shards:
            verify(folder, shard)
        self._shards = [
            IndexedDataset((folder / shard.path).with_suffix("")).tokens for shard in split.shards
        ]
        counts = [max(0, len(tokens) - 1) // sequence_length for tokens in self._shards]
        self._ends = np.cumsum(counts)
        if sum(counts) == 0:
            raise UserError(
                f"{split.tokens} training tokens are fewer than one sample of "
                f"data.sequence_length + 1 = {sequence_length + 1}; give more text or a shorter one"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """One sample: int64 [sequence_length + 1]."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        start = (index - before) * self.sequence_length
        return self._shards[shard][start : start + self.sequence_length + 1].astype(np.int64)


def verify(folder: Path, shard: Shard) -> None:
    """Compare the content of a shard's two files with its record.

    Raises:
        UserError: one is absent, or one of its bits is not what was written.
    """
    tokens = folder / shard.path
    for path, written in ((tokens, shard.md5), (tokens.with_suffix(".idx"), shard.index_md5)):
        if not path.is_file():
            raise UserError(f"{path}: a token shard's file is missing; run preprocess again")
        found = md5(path)
        if found != written:
            raise UserError(
                f"{path}: the file's md5 is {found}, but {written} was written; it is damaged: "
                "delete it and run preprocess again"
            )

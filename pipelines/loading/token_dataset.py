"""Maps samples of a fixed length to the bytes of one split's token shards."""

# ruff: noqa: N806 (names that end in their shape)

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipelines.core.errors import UserError
from pipelines.data.tokens.token_shards import ShardIndex
from pipelines.loading.sampler import Mixture
from pipelines.loading.sources.readers import Numbers, Ranges, Reader
from pipelines.loading.sources.shard_files import ReaderKind, find
from pipelines.run.records import MixturePart, Split


class TokenDataset:
    """Samples of `sequence_length + 1` tokens each: the inputs, and each input's next token.

    If documents are concatenated, a shard's samples follow each other and overlap by one token, so
    that every token except a shard's first is predicted. An incomplete sample at a shard's end is
    not read. If documents are packed, each sample is one document of the index.

    Attributes:
        sequence_length: Inputs per sample.
        dtype: The type of a stored token id: uint16 or int32.
        has_mask: Whether some tokens are not to be predicted.
        mixture: Weights and samples of the datasets, whose samples are numbered one dataset after
            another; None if there is only one.
        has_documents: Whether a loader must call `documents`.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        sequence_length: int,
        *,
        packed_length: int | None = None,
        mixture: Sequence[MixturePart] = (),
        documents: bool = False,
        reader: ReaderKind = "auto",
        remote: str | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Find the shards of `split`, and check their content.

        Args:
            folder: The shards' paths are relative to it.
            split: A split of a dataset.
            sequence_length: Inputs per sample.
            packed_length: As in the dataset's record.
            mixture: As in the dataset's record.
            documents: Whether a token attends only to its own document.
            reader: How to read the tokens; see `shard_files.find` for this and what follows.
            remote: Where to stream shards from that `folder` lacks.
            part: (rank, world), to verify only a part of the shards in this process.

        Raises:
            UserError: a shard is missing or damaged, or all shards, or those of one part of a
                mixture, hold less than one sample.
        """
        self.sequence_length = sequence_length
        self.has_documents = documents
        self._files = find(folder, split, reader, remote, part)
        # Packed samples share no token; others do: the last target is the next sample's input.
        self._stride = sequence_length + (packed_length is not None)
        if packed_length not in (None, sequence_length):
            raise UserError(
                f"data.sequence_length = {sequence_length}, but the dataset was packed for "
                f"{packed_length}; set it to that length"
            )
        spare = self._stride == sequence_length
        counts = [max(0, shard.tokens - spare) // self._stride for shard in split.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._begins = self._ends - counts
        if sum(counts) == 0:
            raise UserError(
                f"{split.tokens} training tokens are fewer than one sample of "
                f"data.sequence_length + 1 = {sequence_length + 1}; add text or lower the length"
            )
        self.mixture = _mixture(mixture, counts) if mixture else None
        indexes = [ShardIndex(path) for path in self._files.indexes]
        self.dtype = _one_dtype(indexes, split)
        self._pointers = [index.pointers() for index in indexes] if documents else []
        self.has_mask = _all_or_none(split)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def most_documents(self) -> int:
        """The most documents that a sample may hold; 1 unless `documents` are told apart."""
        if not self.has_documents:
            return 1
        most, size, length = 1, self.dtype.itemsize, self.sequence_length
        for begins, begin, end in zip(self._pointers, self._begins, self._ends, strict=True):
            starts = np.arange(end - begin, dtype=np.int64) * self._stride
            first, last = (
                np.searchsorted(begins, (starts + place) * size, side="right")
                for place in (1, length)
            )
            most = max(most, 1 + int((last - first).max(initial=0)))
        return most

    def open(self, device: torch.device) -> Reader:
        """Return a reader of the files that the ranges of `tokens` and `mask` refer to."""
        return self._files.open(device)

    def tokens(self, samples: Numbers) -> Ranges:
        """Return the byte ranges of samples, each of `sequence_length + 1` token ids."""
        shards, starts = self._places(samples)
        size = self.dtype.itemsize
        return Ranges(shards, starts * size, (self.sequence_length + 1) * size)

    def mask(self, samples: Numbers) -> Ranges:
        """Return the byte ranges of the loss masks of samples' targets, one byte per target."""
        shards, starts = self._places(samples)
        return Ranges(shards + len(self._ends), starts + 1, self.sequence_length)

    def documents(self, samples: Numbers) -> npt.NDArray[np.int32]:
        """Return the document number of each target and its input, as int32 [samples, inputs].

        Numbers count from 0 within a sample. An end-of-document input has the number of the next
        document, which it begins; evaluation scores documents in the same way.
        """
        numbers_BS = np.zeros((len(samples), self.sequence_length), np.int32)
        size = self.dtype.itemsize
        places = zip(*(each.tolist() for each in self._places(samples)), strict=True)
        for row_S, (shard, start) in zip(numbers_BS, places, strict=True):
            begins = self._pointers[shard]
            bounds = ((start + 1) * size, (start + self.sequence_length) * size)
            first, last = np.searchsorted(begins, bounds, side="right")
            try:
                row_S[begins[first:last] // size - start - 1] = 1
            except IndexError as error:
                index = self._files.indexes[shard]
                raise UserError(f"{index}: damaged pointers; run preprocess again") from error
        return np.cumsum(numbers_BS, axis=1, dtype=np.int32)

    def _places(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of each sample, and the sample's first token in it."""
        shards = np.searchsorted(self._ends, samples, side="right")
        return shards, (samples - self._begins[shards]) * self._stride


def _mixture(parts: Sequence[MixturePart], counts: Sequence[int]) -> Mixture:
    """Return the weights and samples of datasets whose shards follow each other."""
    ends = np.cumsum([part.shards for part in parts])
    totals = [sum(found.tolist()) for found in np.split(np.array(counts), ends)[:-1]]
    for part, total in zip(parts, totals, strict=True):
        if total == 0:
            raise UserError(
                f"{part.label}: its training tokens are fewer than one sample of "
                "data.sequence_length + 1; leave it out of data.source.mixture"
            )
    return Mixture(tuple(part.weight for part in parts), tuple(totals))


def _one_dtype(indexes: list[ShardIndex], split: Split) -> np.dtype[Any]:
    for index, shard in zip(indexes, split.shards, strict=True):
        if shard.tokens * index.dtype.itemsize != shard.bytes:
            raise UserError(
                f"{shard.path}: {shard.bytes} bytes can't be {shard.tokens} tokens of "
                f"{index.dtype}; run preprocess again"
            )
    first, *others = {index.dtype for index in indexes}
    if others:
        raise UserError(f"the shards hold ids of {first} and of {others[0]}; run preprocess again")
    return first


def _all_or_none(split: Split) -> bool:
    masked = {shard.mask_md5 is not None for shard in split.shards}
    if len(masked) > 1:
        raise UserError("some shards have a loss mask and some have none; run preprocess again")
    return True in masked

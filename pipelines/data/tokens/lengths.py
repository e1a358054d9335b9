"""How long documents are in tokens: the histogram that a dataset version is compared by."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.core.records import DatasetRef
from pipelines.data.splitting import SPLITS
from pipelines.data.tokens.token_shards import ShardIndex, idx_path, shard_prefix

LENGTH_HISTOGRAM = "length_histogram"  # its key in a dataset's statistics


def document_lengths(folder: Path, dataset: DatasetRef) -> Iterator[npt.NDArray[np.int64]]:
    """Tokens of each document, end-of-document token included: [documents], a shard at a time.

    Of packed samples, each piece and each padding counts as one. Only the shards' indexes are read;
    they lie below `folder`, the output of preprocess.
    """
    for shard in (shard for name in SPLITS for shard in getattr(dataset, name).shards):
        index = ShardIndex(idx_path(shard_prefix(folder / shard.path)))
        yield np.diff(index.sequence_offsets())


def dataset_histogram(folder: Path, dataset: DatasetRef) -> list[int]:
    """`length_histogram` of all documents of both splits."""
    counts = np.zeros(64, np.int64)
    for lengths in document_lengths(folder, dataset):
        found = length_histogram(lengths)
        counts[: len(found)] += found
    return [int(count) for count in np.trim_zeros(counts, "b")]


def length_histogram(lengths: npt.ArrayLike) -> list[int]:
    """Documents of 1, 2 to 3, 4 to 7, … tokens: entry k counts those of 2^k up to 2^(k+1) - 1."""
    _, exponents = np.frexp(np.maximum(np.asarray(lengths, np.float64), 1))
    return [int(count) for count in np.bincount(exponents - 1)]

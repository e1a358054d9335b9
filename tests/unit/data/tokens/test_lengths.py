"""The histogram of documents' lengths: powers of two, nothing lost."""

import numpy as np

from pipelines.data.tokens.token_shards import (
    ShardWriter,
    dataset_histogram,
    document_lengths,
    length_histogram,
)
from pipelines.run.records import DatasetRef, Split


def test_each_bin_reaches_up_to_the_next_power_of_two():
    assert length_histogram([1, 2, 3, 4, 7, 8, 1023, 1024]) == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1]
    assert length_histogram([]) == []
    assert sum(length_histogram(np.arange(1, 5000))) == 4999


def test_lengths_are_those_of_every_shard_of_both_splits(tmp_path):
    splits = {}
    for name, lengths in {"train": ([3, 1], [5]), "validation": ([2],)}.items():
        shards = []
        for number, part in enumerate(lengths):
            writer = ShardWriter(tmp_path / f"{name}-{number}.5", vocab_size=300)
            for length in part:
                writer.add(np.arange(length))
            shards.append(writer.close())
        tokens = sum(shard.tokens for shard in shards)
        splits[name] = Split(documents=1, bytes=1, tokens=tokens, shards=tuple(shards))
    dataset = DatasetRef(vocab_size=300, **splits)
    lengths = np.concatenate([*document_lengths(tmp_path, dataset)])
    assert lengths.tolist() == [3, 1, 5, 2]
    assert dataset_histogram(tmp_path, dataset) == length_histogram([3, 1, 5, 2])

import time
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.data.tokens import assembly as packing_module
from pipelines.data.tokens.assembly import Packing, best_fit, write_packed
from pipelines.data.tokens.token_shards import ShardWriter
from tests.indexed_dataset import IndexedDataset

END = 7

lengths = st.lists(st.integers(1, 40), max_size=60)


def pieces(packing: Packing) -> list[list[tuple[int, int, int]]]:
    """(document, start, length) of each piece of each sample."""
    columns = (packing.documents, packing.starts, packing.lengths)
    flat = list(zip(*(column.tolist() for column in columns), strict=True))
    ends = np.cumsum(packing.samples).tolist()
    return [flat[end - count : end] for end, count in zip(ends, packing.samples, strict=True)]


def tokens(sample: list[tuple[int, int, int]]) -> int:
    return sum(length for _, _, length in sample)


def one_by_one(sizes: list[int], capacity: int) -> list[list[tuple[int, int, int]]]:
    """Best fit decreasing as a textbook has it: each piece looks at every sample."""
    cut = [
        (document, start, min(capacity, size - start))
        for document, size in enumerate(sizes)
        for start in range(0, size, capacity)
    ]
    samples: list[list[tuple[int, int, int]]] = []
    for piece in sorted(cut, key=lambda piece: -piece[2]):
        room = [capacity - tokens(sample) for sample in samples]
        fitting = [index for index in range(len(samples)) if room[index] >= piece[2]]
        if fitting:
            samples[min(fitting, key=lambda index: room[index])].append(piece)
        else:
            samples.append([piece])
    return samples


@settings(max_examples=300)
@given(lengths, st.integers(1, 30))
@example([], 5)
@example([5], 5)
@example([11], 5)
def test_every_token_lies_in_one_sample_and_none_is_too_long(
    sizes: list[int], capacity: int
) -> None:
    packing = best_fit(np.array(sizes, np.int64), capacity)
    seen = [np.zeros(size, int) for size in sizes]
    for sample in pieces(packing):
        assert 0 < tokens(sample) <= capacity
        assert sample == sorted(sample)  # in the order of the documents
        for document, start, length in sample:
            seen[document][start : start + length] += 1
    assert all((counts == 1).all() for counts in seen)
    leaders = [sample[0] for sample in pieces(packing)]
    assert leaders == sorted(leaders)
    assert len(packing.documents) == sum(-(-size // capacity) for size in sizes)


@settings(max_examples=300)
@given(lengths, st.integers(1, 30))
@example([8, 8, 3, 3, 3, 3, 2, 2, 1, 1, 1, 1], 9)
def test_samples_are_as_full_as_with_the_textbooks_best_fit(
    sizes: list[int], capacity: int
) -> None:
    # Which of two samples with the same room takes a piece is free, and changes no later room.
    ours, theirs = (
        pieces(best_fit(np.array(sizes, np.int64), capacity)),
        one_by_one(sizes, capacity),
    )
    assert sorted(map(tokens, ours)) == sorted(map(tokens, theirs))


def document_sizes(count: int) -> npt.NDArray[np.int64]:
    """As of web text: a median of some 400 tokens and a long tail."""
    return np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, count).astype(np.int64))


def test_only_documents_longer_than_a_sample_are_cut() -> None:
    sizes, capacity = document_sizes(20_000), 2049
    packing = best_fit(sizes, capacity)
    cut = np.bincount(packing.documents) > 1
    assert (cut == (sizes > capacity)).all()
    ends = np.cumsum(sizes)
    cut_by_concat = ((ends - sizes) // capacity != (ends - 1) // capacity).sum()
    assert cut.sum() < cut_by_concat / 3
    assert packing.fill > 0.999
    assert len(packing.samples) <= -(-sizes.sum() // capacity) * 1.001


@pytest.mark.parametrize("capacity", [2049, 131_073])
def test_a_million_documents_take_seconds(capacity: int) -> None:
    sizes = document_sizes(1_000_000)
    began = time.process_time()
    packing = best_fit(sizes, capacity)
    assert time.process_time() - began < 10
    assert packing.lengths.sum() == sizes.sum()


def packed(
    prefix: Path, documents: list[list[int]], masks: list[list[int]] | None, capacity: int
) -> tuple[Packing, IndexedDataset]:
    sizes = np.array([len(ids) for ids in documents], np.int64)
    packing = best_fit(sizes, capacity)
    writer = ShardWriter(prefix, 1000, masked=True)
    ids = np.array([token for document in documents for token in document], np.uint16)
    mask = None if masks is None else np.array([bit for bits in masks for bit in bits], np.uint8)
    write_packed(writer, packing, ids, sizes, mask, END)
    writer.close()
    return packing, IndexedDataset(prefix)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(100, 999), min_size=1, max_size=25), min_size=1, max_size=20),
    st.integers(2, 12),
    st.sampled_from([1, 20, 1 << 22]),
    st.randoms(use_true_random=False),
)
def test_samples_are_written_with_their_padding_masked(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    capacity: int,
    chunk: int,
    random: Random,
) -> None:
    masks = [[random.choice([0, 1]) for _ in document] for document in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "_CHUNK", chunk)
        packing, shard = packed(tmp_path_factory.mktemp("x") / "x", documents, masks, capacity)
    assert shard.mask is not None
    assert (np.diff(shard.document_offsets) == capacity).all()
    expected_ids, expected_mask, expected_sizes = [], [], []
    for sample in pieces(packing):
        for document, start, length in sample:
            expected_ids += documents[document][start : start + length]
            expected_mask += masks[document][start : start + length]
        padding = capacity - tokens(sample)
        expected_ids += [END] * padding
        expected_mask += [0] * padding
        expected_sizes += [length for _, _, length in sample] + [padding] * (padding > 0)
    assert shard.tokens.tolist() == expected_ids
    assert shard.mask.tolist() == expected_mask
    assert np.diff(shard.sequence_offsets).tolist() == expected_sizes


def test_plain_text_is_predicted_and_padding_is_not(tmp_path: Path) -> None:
    _, shard = packed(tmp_path / "x", [[1, 2, 3, END], [4, 5, END], [6, END]], None, 7)
    assert shard.mask is not None
    assert shard.tokens.tolist() == [1, 2, 3, END, 4, 5, END, 6, END, *[END] * 5]
    assert shard.mask.tolist() == [1] * 9 + [0] * 5
    assert len(shard) == 2


def test_no_documents_are_no_samples(tmp_path: Path) -> None:
    packing, shard = packed(tmp_path / "x", [], None, 7)
    assert packing.fill == 0
    assert len(shard) == len(shard.tokens) == 0

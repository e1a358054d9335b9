import hashlib
import random
import resource
import tracemalloc
from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.data.duplicates import deduplication
from pipelines.data.duplicates.deduplication import (
    Duplicates,
    find_duplicates,
    match_partition,
    partitions_for,
    write_keys,
)
from pipelines.data.duplicates.minhash import Signer, band_keys, bands, similar, sketches
from pipelines.recipe.cleaning_section import Dedup

NEAR = Dedup(kind="minhash", ngram=2, permutations=32, jaccard=0.6)
EXACT = Dedup(kind="exact")


def ids_of(texts: Sequence[str]) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def search(
    texts: list[str], dedup: Dedup, cuts: Sequence[int] = (), partitions: int = 1
) -> Duplicates:
    """Through key files of the blocks between the cuts."""
    limits = [0, *sorted(cuts), len(texts)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for start, stop in pairwise(limits):
            files.append(folder / f"keys-{len(files)}")
            write_keys(files[-1], ids_of(texts[start:stop]), texts[start:stop], dedup)
        match = partial(
            match_partition, partitions=partitions, key_files=files, dedup=dedup, folder=folder
        )
        return find_duplicates([match(partition) for partition in range(partitions)])


def as_dict(found: Duplicates) -> dict[int, tuple[int, bool]]:
    rows = zip(found.numbers.tolist(), found.firsts.tolist(), found.exact.tolist(), strict=True)
    return {number: (first, exact) for number, first, exact in rows}


def search_all_pairs(texts: list[str], dedup: Dedup) -> dict[int, tuple[int, bool]]:
    """By comparing every two documents."""
    signatures = Signer(dedup.ngram, dedup.permutations).sign(texts)
    keys, small = (
        band_keys(signatures, *bands(dedup.permutations, dedup.jaccard)),
        sketches(signatures),
    )
    first = list(range(len(texts)))
    for a, b in combinations(range(len(texts)), 2):
        shared = (keys[a] == keys[b]).any()
        near = shared and similar(small[a : a + 1], small[b : b + 1], dedup.jaccard)[0]
        if texts[a] == texts[b] or (dedup.kind == "minhash" and near):
            low, high = sorted((first[a], first[b]))
            first = [low if found == high else found for found in first]
    return {i: (found, texts[i] in texts[:i]) for i, found in enumerate(first) if found != i}


@st.composite
def corpora(draw: st.DrawFn) -> list[str]:
    """Documents of some 12 words, most of which differ little from an earlier one."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    documents = [[f"w{generator.randrange(40)}" for _ in range(12)] for _ in range(4)]
    for _ in range(draw(st.integers(0, 16))):
        copy = list(generator.choice(documents))
        for _ in range(generator.choice([0, 0, 1, 1, 2, 6])):
            copy[generator.randrange(len(copy))] = f"w{generator.randrange(40)}"
        documents.append(copy)
    return [" ".join(words) for words in documents]


@settings(max_examples=40)
@given(corpora(), st.data())
def test_any_blocks_and_partitions_find_what_all_pairs_find(
    texts: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(texts)), max_size=5))
    partitions = data.draw(st.integers(1, 9))
    found = search(texts, NEAR, cuts, partitions)
    assert as_dict(found) == search_all_pairs(texts, NEAR)


@settings(max_examples=20)
@given(corpora(), st.data())
def test_large_buckets_too_are_the_same_in_any_blocks_and_partitions(
    texts: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(texts)), max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplication, "_RUN", 2)
        patch.setattr(deduplication, "_COMPARED", 3)
        patch.setattr(deduplication, "_FOLDED", 1)
        expected = search(texts, NEAR)
        found = search(texts, NEAR, cuts, data.draw(st.integers(1, 9)))
    assert as_dict(found) == as_dict(expected)
    assert set(as_dict(found)) <= set(search_all_pairs(texts, NEAR))


def test_the_exact_kind_drops_the_same_texts_only() -> None:
    texts = ["a b c d", "a b c e", "a b c d", "x", "a b c d", "x"]
    assert as_dict(search(texts, EXACT, [1, 3], 3)) == {2: (0, True), 4: (0, True), 5: (3, True)}


def test_a_copy_of_a_near_duplicate_counts_as_exact() -> None:
    words = [f"w{i}" for i in range(100)]
    near = " ".join(["other", *words[1:]])
    found = search([" ".join(words), near, near, "something else"], Dedup(kind="minhash"), [2], 4)
    assert as_dict(found) == {1: (0, False), 2: (0, True)}


def test_a_block_is_told_its_rows() -> None:
    found = search(["a", "b", "a", "c", "b", "a", "d", "a"], EXACT, [3])
    assert [part.tolist() for part in found.in_block(0, 3)] == [[2], [True]]
    assert [part.tolist() for part in found.in_block(3, 4)] == [[1, 2], [True, True]]
    assert [part.tolist() for part in found.in_block(7, 1)] == [[0], [True]]
    assert [part.tolist() for part in found.in_block(6, 1)] == [[], []]


@pytest.mark.parametrize("dedup", [EXACT, NEAR])
def test_a_page_copied_very_often_stays_once(dedup: Dedup) -> None:
    """More copies than are compared at once, behind another page that shares their bucket."""
    texts = [f"page {i % 2} of a site that all know by heart and nobody reads" for i in range(5000)]
    dedup = dedup.model_copy(update={"jaccard": 0.9}) if dedup is NEAR else dedup
    assert search(texts, dedup, [1500]).numbers.tolist() == list(range(2, 5000))


def test_no_document_at_all_is_no_duplicate() -> None:
    assert as_dict(search([], NEAR)) == {}
    assert as_dict(search(["one"], NEAR, [0, 0, 1, 1], 5)) == {}


def test_one_partition_for_few_documents_and_many_for_many() -> None:
    assert partitions_for(0, NEAR) == 1
    assert partitions_for(100_000, Dedup(kind="minhash")) == 1
    assert partitions_for(10**9, EXACT) == 477
    assert partitions_for(10**9, Dedup(kind="minhash")) == 8107


def test_a_partition_needs_memory_for_its_own_keys_only(tmp_path: Path) -> None:
    texts = [f"w{i} w{i + 1} w{i * 7} w{i // 2}" for i in range(20_000)]
    files = []
    for start in range(0, len(texts), 2000):
        files.append(tmp_path / f"keys-{start}")
        write_keys(
            files[-1], ids_of(texts)[start : start + 2000], texts[start : start + 2000], NEAR
        )

    def peak(partitions: int) -> int:
        tracemalloc.start()
        match_partition(0, partitions=partitions, key_files=files, dedup=NEAR, folder=tmp_path)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(20) < peak(1) / 4


def test_more_files_than_may_be_open_at_once(tmp_path: Path) -> None:
    files = []
    for number in range(150):
        files.append(tmp_path / f"keys-{number}")
        write_keys(files[-1], ids_of(["a b c"]), ["a b c"], NEAR)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        edges = match_partition(0, partitions=1, key_files=files, dedup=NEAR, folder=tmp_path)
        found = find_duplicates([edges] * 150)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found.numbers.tolist() == list(range(1, 150))


def test_a_retried_task_writes_the_same_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    texts = ["a b c d e f", "a b c d e g", "a b c d e f"]
    contents = []
    for _ in range(2):
        write_keys(tmp_path / "keys", ids_of(texts), texts, NEAR)
        edges = match_partition(
            0, partitions=1, key_files=[tmp_path / "keys"], dedup=NEAR, folder=tmp_path
        )
        contents.append([(tmp_path / "keys").read_bytes(), edges.read_bytes()])
    assert contents[0] == contents[1]
    assert {path.name for path in tmp_path.iterdir()} == {"keys", edges.name}


def test_planted_near_duplicates_are_found_and_others_stay() -> None:
    generator = np.random.default_rng(0)
    words = [f"word{i}" for i in range(3000)]
    originals = [list(generator.choice(words, 200)) for _ in range(300)]
    near, far = [], []
    for document in originals:
        for copies, edits in ((near, 2), (far, 14)):  # Jaccard some 0.9, and some 0.5
            copy = list(document)
            for position in np.linspace(5, 190, edits).astype(int):
                copy[position] = "edited"
            copies.append(copy)
    texts = [" ".join(document) for document in [*originals, *near, *far]]
    dropped = set(search(texts, Dedup(kind="minhash"), [100, 500], 3).numbers.tolist())
    assert len(dropped & set(range(300, 600))) >= 298
    assert dropped <= set(range(300, 600))

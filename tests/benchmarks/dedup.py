"""dedup: text in, the documents to drop out; ours against datasketch's MinHash and LSH.

100,000 documents of 100 to 300 words, drawn from a Zipf vocabulary by a chain in which words have
favourite successors. A tenth of them are planted: copies of an earlier document, exact or edited to
a Jaccard similarity of 0.85 or more, which are to be found; as many are edited down to between 0.4
and 0.6, which are not. Each side has one process and one thread, and times all from the texts on.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.harness import Benchmark, Contender, Demand

DOCUMENTS = 100_000
PLANTED = 10_000  # of duplicates, and of documents that resemble another too little
WORDS = 30_000  # of the vocabulary
SHORTEST, LONGEST = 100, 300
NGRAM = 5
OPTIONS = {"ngram": NGRAM, "permutations": 128, "jaccard": 0.8}

Words = npt.NDArray[np.int64]


def make_data(folder: Path) -> dict[str, Any]:
    """Write `texts.txt`, a document a line, and `truth.txt`: 1 where one is to be dropped."""
    generator = np.random.default_rng(20_240_229)
    vocabulary = _vocabulary(generator)
    originals = _chain(generator, DOCUMENTS - 2 * PLANTED)
    copied = generator.choice(len(originals), PLANTED)  # some several times
    resembled = generator.choice(len(originals), PLANTED, replace=False)
    planted = np.concatenate([copied, resembled])
    documents = [*originals]
    for number, original in enumerate(planted):
        low, high = (0.85, 1.0) if number < PLANTED else (0.4, 0.6)
        similarity = 1.0 if number % 10 == 0 and high == 1.0 else generator.uniform(low, high)
        documents.append(_edited(generator, originals[original], similarity))
    alone = np.arange(len(originals) + PLANTED, DOCUMENTS)
    family = np.concatenate([np.arange(len(originals)), copied, alone])
    order = generator.permutation(DOCUMENTS)
    _, first = np.unique(family[order], return_index=True)
    dropped = np.ones(DOCUMENTS, int)
    dropped[first] = 0
    with (folder / "texts.txt").open("w", encoding="utf-8") as file:
        file.writelines(_sentences(vocabulary, documents[number]) + "\n" for number in order)
    (folder / "truth.txt").write_text("".join(map(str, dropped)))
    return OPTIONS


def _vocabulary(generator: np.random.Generator) -> list[str]:
    consonants, vowels = list("bcdfghjklmnprstvwz"), list("aeiou")
    lengths = generator.integers(1, 5, WORDS)
    return [
        "".join(generator.choice(consonants) + generator.choice(vowels) for _ in range(length))
        for length in lengths
    ]


def _chain(generator: np.random.Generator, count: int) -> list[Words]:
    """Documents as word numbers: half of the words are a favourite successor of the one before."""
    weights = 1 / np.arange(1, WORDS + 1)
    cumulative = np.cumsum(weights / weights.sum())
    favourites = np.searchsorted(cumulative, generator.random((WORDS, 8)))
    words = np.empty((count, LONGEST), np.int64)
    words[:, 0] = np.searchsorted(cumulative, generator.random(count))
    for position in range(1, LONGEST):
        fresh = np.searchsorted(cumulative, generator.random(count))
        next_one = favourites[words[:, position - 1], generator.integers(0, 8, count)]
        words[:, position] = np.where(generator.random(count) < 0.5, fresh, next_one)
    words = np.minimum(words, WORDS - 1)
    lengths = generator.integers(SHORTEST, LONGEST + 1, count)
    return [row[:length] for row, length in zip(words, lengths, strict=True)]


def _edited(generator: np.random.Generator, words: Words, similarity: float) -> Words:
    """A copy whose shingles overlap that much: cut short, or with single words changed.

    A changed word spoils n shingles of both; with a part f of them spoilt, J = (1 - f) / (1 + f).
    """
    shingles = len(words) - NGRAM + 1
    if similarity < 1 and generator.random() < 0.3:
        return words[: round(shingles * similarity) + NGRAM - 1]
    spoilt = (1 - similarity) / (1 + similarity) * shingles
    count = int(spoilt / NGRAM) if similarity > 0.8 else round(spoilt / NGRAM)
    copy = words.copy()
    places = (
        NGRAM * generator.choice((len(words) - NGRAM) // NGRAM, count, replace=False) + NGRAM - 1
    )
    copy[places] = generator.integers(0, WORDS, count)
    return copy


def _sentences(vocabulary: list[str], words: Words) -> str:
    text = [vocabulary[word] for word in words.tolist()]
    for start in range(0, len(text), 12):
        text[start] = text[start].capitalize()
        text[start - 1] += "."
    return " ".join(text)


BENCHMARK = Benchmark(
    name="dedup",
    unit="documents",
    contenders=[
        Contender("penstock", "dedup_ours"),
        Contender("datasketch", "dedup_datasketch", "bench", {"hash": "sha1"}),
        Contender("datasketch, xxhash", "dedup_datasketch", "bench", {"hash": "xxhash"}),
    ],
    demands=[Demand(over="datasketch", ratio=20), Demand(over="datasketch, xxhash", ratio=10)],
    make_data=make_data,
)

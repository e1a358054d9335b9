"""preprocess: the whole stage, from JSONL to Megatron shards; ours on Ray against datatrove.

English-like documents: Zipf words and real stop words in sentences and paragraphs. One in ten is a
copy of an earlier document, exact or with a few words changed; one in ten is what the filters drop.
Both sides run the filters of Gopher, quality and repetition, with the paper's thresholds, MinHash
deduplication (words in fives, 128 permutations) and the same byte-level BPE, on two workers, and
end with Megatron's `.bin` and `.idx`. C4's filter is left out: datatrove's changes documents.

20 MB of text, as datatrove takes some minutes for them; a larger corpus is kinder to ours, whose
passes have a second or so that does not grow.

Starting Ray is not timed, nor are datatrove's imports: both are a contender's set-up, which is
stated apart. Its workers are forked, which takes no time worth the name.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.harness import Benchmark, Contender, Demand

CORPUS_BYTES = 20_000_000
FILES = 8
VOCABULARY = 8000  # of the tokenizer
_WORDS = 20_000
_SEED = 20_240_301
_STOP_WORDS = ("the", "of", "and", "to", "a", "in", "that", "is", "with", "for", "be", "have", "it")
_SAMPLE = 4000  # documents that the tokenizer is trained on


def make_data(folder: Path) -> dict[str, Any]:
    """Write the corpus and a tokenizer trained on a part of it."""
    from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe

    (folder / "corpus").mkdir()
    files = [(folder / "corpus" / f"{n:02d}.jsonl").open("w") for n in range(FILES)]
    sample: list[str] = []
    size = 0
    for number, text in enumerate(_documents()):
        record = {"text": text, "id": str(number)}
        files[size * FILES // CORPUS_BYTES].write(json.dumps(record) + "\n")
        if len(sample) < _SAMPLE:
            sample.append(text)
        size += len(text)
        if size >= CORPUS_BYTES:
            break
    for file in files:
        file.close()
    save_tokenizer(train_bpe(sample, VOCABULARY), folder / "tokenizer")
    return {"bytes": size, "workers": 2, "ngram": 5, "permutations": 128, "jaccard": 0.8}


def _documents() -> Iterator[str]:
    random = np.random.default_rng(_SEED)
    words = _vocabulary(random)
    weights = np.cumsum(1 / (np.arange(len(words)) + 2.7))
    earlier: list[list[str]] = []
    while True:
        kind = random.random()
        if kind < 0.1 and earlier:
            text = _changed(random, earlier[random.integers(len(earlier))], words)
        else:
            drawn = np.searchsorted(weights, random.random(random.integers(150, 700)) * weights[-1])
            text = [words[number] for number in drawn]
            if kind < 0.2:
                yield _junk(random, text)
                continue
            earlier.append(text)
        yield _prose(text)


def _vocabulary(random: np.random.Generator) -> list[str]:
    syllables = [c + v for c in "bcdfghlmnprstvw" for v in ("a", "e", "i", "o", "u", "er", "in")]
    made = {"".join(random.choice(syllables, random.integers(2, 5))) for _ in range(2 * _WORDS)}
    return [*_STOP_WORDS, *sorted(made, key=len)[:_WORDS]]


def _changed(random: np.random.Generator, text: list[str], words: list[str]) -> list[str]:
    """A copy, half of them with one or two words changed: more than 0.8 of the shingles stay."""
    copy = list(text)
    for _ in range(random.integers(3) if random.random() < 0.5 else 0):
        copy[random.integers(len(copy))] = words[random.integers(len(words))]
    return copy


def _prose(words: list[str]) -> str:
    """Sentences of some dozen words, paragraphs of five; where they end depends on the words."""
    sentences, start = [], 0
    for end, word in enumerate(words, 1):
        if (end - start > 6 and len(word) % 4 == 0) or end == len(words):
            sentences.append(" ".join(words[start:end]).capitalize() + ".")
            start = end
    return "\n\n".join(" ".join(sentences[n : n + 5]) for n in range(0, len(sentences), 5))


def _junk(random: np.random.Generator, words: list[str]) -> str:
    """What the filters drop: lists, one line again and again, or too few words."""
    match random.integers(3):
        case 0:
            return "\n".join(f"- {one} {other}" for one, other in pairwise(words))
        case 1:
            return "\n".join([" ".join(words[:8]).capitalize() + "."] * 30)
        case _:
            return " ".join(words[:20])


BENCHMARK = Benchmark(
    name="preprocess",
    unit="MB",
    contenders=[
        Contender("penstock", "preprocess_ours"),
        Contender("datatrove", "preprocess_datatrove", venv="bench"),
    ],
    demands=[Demand(over="datatrove", ratio=2)],
    make_data=make_data,
)

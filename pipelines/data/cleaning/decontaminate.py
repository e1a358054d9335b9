"""Finds text of evaluation sets in documents by 13-gram overlap, as for GPT-3.

Brown et al. 2020, arXiv 2005.14165, appendix C: lower case, no punctuation, words between
whitespace. These are the differences:

- Brown et al. cut a window around a match out of a document. Here documents stay whole: the caller
  drops a document that shares enough n-grams.
- They ignore n-grams found in more than ten training documents, which are phrases, not leaks. That
  takes a count over the whole corpus. Here every n-gram counts; a `min_shared` above 1 tolerates a
  phrase or two.
- An evaluation text of fewer than n words has no n-gram: it only matches a document that consists
  of exactly this text.
- A Han character is a word, because Chinese and Japanese put no spaces between words.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import UserError
from pipelines.data.cleaning.words import (
    Hashes,
    Kind,
    code_points,
    find_words,
    hash_ngrams,
    hash_words,
    kinds,
)

EVALUATION_SETS = "evaluation_sets"  # in preprocess's output: a file of n-grams for each set
_BITS_PER_NGRAM = 8  # in the bit set before the search; one n-gram in eight passes it
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def set_names(paths: Iterable[str]) -> list[str]:
    """Name each evaluation set by the last part of its path, with a number if that is taken."""
    names: list[str] = []
    for path in paths:
        name = last = re.sub(r"[^\w.-]", "_", Path(path).name)
        number = 1
        while name in names:
            number += 1
            name = f"{last}-{number}"
        names.append(name)
    return names


def set_files(preprocess: Path) -> dict[str, Path]:
    """Return the evaluation sets' n-gram files in preprocess's output, by name."""
    files = sorted((preprocess / EVALUATION_SETS).glob("*.npy"))
    return {path.stem: path for path in files}


class Overlap(NamedTuple):
    """How much of a document also occurs in evaluation texts."""

    shared: int  # shared n-grams, each occurrence counted
    share: float  # fraction of the document's n-grams


class EvaluationNgrams:
    """The n-grams of evaluation texts, as sorted hashes that many tasks can memory-map at once."""

    def __init__(self, n: int, hashes: Hashes) -> None:
        self.n = n
        self._hashes = hashes  # sorted, unique
        self._bits, self._mask = _bit_set(hashes)

    @classmethod
    def build(cls, texts: Iterable[str], n: int) -> Self:
        """Return the n-grams of all texts; the order of the texts does not matter."""
        parts = [np.unique(_ngrams(text, n)) for text in texts]
        return cls(n, np.unique(np.concatenate([np.empty(0, np.uint64), *parts])))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Memory-map a file that `save` wrote; processes share its pages.

        Raises:
            UserError: The file is not a file of n-grams.
        """
        try:
            stored = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(f"{path}: this is not a file of n-grams: {error}") from error
        if stored.dtype != np.uint64 or stored.ndim != 1 or not len(stored):
            raise UserError(f"{path}: not a file of n-grams: it has {stored.dtype} {stored.shape}")
        return cls(int(stored[0]), stored[1:])

    def save(self, path: Path) -> None:
        """Write a .npy file of uint64: n, then the sorted hashes."""
        part = path.with_name(f".{path.name}")
        with part.open("wb") as file:
            np.save(file, np.concatenate(([np.uint64(self.n)], self._hashes)))
        part.replace(path)

    def __len__(self) -> int:
        """Return how many different n-grams there are."""
        return len(self._hashes)

    def overlap(self, text: str) -> Overlap:
        """Return the number and share of a document's n-grams that evaluation texts contain."""
        ngrams = _ngrams(text, self.n)
        slots = ngrams & self._mask
        bits = self._bits[slots >> np.uint64(3)] >> (slots & np.uint64(7)).astype(np.uint8)
        likely = ngrams[(bits & 1).astype(np.bool_)]
        if not len(likely):
            return Overlap(0, 0.0)
        places = np.searchsorted(self._hashes, likely)
        places[places == len(self._hashes)] = 0
        shared = np.count_nonzero(self._hashes[places] == likely)
        return Overlap(int(shared), float(shared / len(ngrams)))


def _ngrams(text: str, n: int) -> Hashes:
    """Return hashes of a text's n-grams, or one hash of a whole text of fewer than n words."""
    codes = code_points(text.lower())
    classes = kinds(codes)
    kept = classes <= Kind.NUMBER  # no punctuation, no symbols
    codes, classes = codes[kept], classes[kept]
    alone = None if text.isascii() else _is_han(codes)
    hashes = hash_words(codes, find_words(classes == Kind.SPACE, alone))
    return hash_ngrams(hashes, min(n, len(hashes)) or n)


def _is_han(codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return whether each character is a Han character [characters]."""
    found = np.zeros(len(codes), np.bool_)
    for first, last in _HAN:
        found |= (codes >= first) & (codes <= last)
    return found


def _bit_set(hashes: Hashes) -> tuple[NDArray[np.uint8], np.uint64]:
    """Return a bit set indexed by the low bits of each hash, and the mask of those bits.

    A look-up there is far cheaper than a binary search, and nearly always shows that there is
    nothing to find.
    """
    size = 1 << max(3, (len(hashes) * _BITS_PER_NGRAM - 1).bit_length())
    mask = np.uint64(size - 1)
    bits = np.zeros(size, np.bool_)
    bits[hashes & mask] = True
    return np.packbits(bits, bitorder="little"), mask

"""MinHash signatures and the bands of locality-sensitive hashing, for batches of texts.

A signature holds the smallest value of each of many hash functions over a text's shingles. Two
signatures agree in about the same fraction as their sets of shingles overlap (Broder 1997).
Signatures are cut into bands of some rows; two texts are worth a comparison if one band is equal
in both (Indyk and Motwani 1998).

    Signer.sign(texts) ─▶ signatures ─▶ band_keys: which to compare
                                     └▶ sketches ─▶ similar: the comparison

The Rust library rensa computes the minima, with the same values on every machine.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import starmap

import numpy as np
import numpy.typing as npt

from pipelines.data.duplicates.shingles import U64, Indices, mix, shingles, words
from pipelines.data.normalize import cut

Signatures = npt.NDArray[np.uint32]  # [texts, permutations]
Sketches = npt.NDArray[np.uint8]  # [texts, permutations]

_SEED = 42  # seed of the permutations
_CHUNK_CHARACTERS = 100_000  # of texts that are signed at once: their arrays fit a core's cache
_PIECE_CHARACTERS = 1_000_000  # a longer text is signed alone, in pieces of this size
# A false match costs only a comparison, but a missed match keeps a duplicate.
_MISS_WEIGHT = 0.95
_CHANCE = 1 / 256  # probability that the sketch bytes of two different minima are equal


class Signer:
    """Computes signatures of texts: `permutations` minima over shingles of `ngram` words."""

    def __init__(self, ngram: int, permutations: int) -> None:
        self._ngram = ngram
        self._permutations = permutations
        self._pack = struct.Struct(f"<{permutations}I").pack

    def sign(self, texts: Sequence[str]) -> Signatures:
        """Return signatures [texts, permutations]; each depends only on its own text."""
        signatures = np.empty((len(texts), self._permutations), np.uint32)
        for part in _chunks(texts):
            if len(texts[part.start]) > _PIECE_CHARACTERS:
                signatures[part], offsets = self._sign_long(texts[part.start])
            else:
                hashes, offsets = words(texts[part])
                signatures[part] = self._minima(*shingles(hashes, offsets, self._ngram))
            for i in part.start + np.flatnonzero(offsets[1:] == offsets[:-1]):
                # A text without words, such as a row of dashes, only matches itself.
                signatures[i] = self._minima(_hash_text(texts[i]), np.array([0, 1]))
        return signatures

    def _sign_long(self, text: str) -> tuple[Signatures, Indices]:
        """Sign a text, [1, permutations], in pieces, because words take 50 bytes a letter."""
        least = np.full((1, self._permutations), np.iinfo(np.uint32).max, np.uint32)
        hashes, count = np.empty(0, np.uint32), 0
        for piece in cut(text, _PIECE_CHARACTERS):
            found, _ = words([piece])
            count += len(found)
            hashes = np.concatenate([hashes[max(0, len(hashes) - self._ngram + 1) :], found])
            offsets = np.array([0, len(hashes)])
            least = np.minimum(least, self._minima(*shingles(hashes, offsets, self._ngram)))
        return least, np.array([0, count])

    def _minima(self, hashes: U64, offsets: Indices) -> Signatures:
        """Return each row's smallest hashes, or the greatest value for a row without hashes."""
        from rensa import RMinHash  # a slow import that `penstock --help` does not need

        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, offsets.astype(np.uint64), self._permutations, _SEED
        )
        # The rows are lists of numbers, for which numpy takes three times as long.
        content = b"".join(starmap(self._pack, matrix.to_rows()))
        return np.frombuffer(content, "<u4").reshape(-1, self._permutations)


def _chunks(texts: Sequence[str]) -> Iterator[slice]:
    """Yield slices of texts that are signed at once; a long text is alone."""
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    start = characters = 0
    while start < len(texts):
        stop = int(np.searchsorted(ends, characters + _CHUNK_CHARACTERS, side="right"))
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start, characters = stop, int(ends[stop - 1])


def _hash_text(text: str) -> U64:
    """Return a hash of a whole text, [1]."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.frombuffer(digest, "<u8")


@cache
def bands(permutations: int, jaccard: float) -> tuple[int, int]:
    """Return how many bands, and of how many rows, find texts of at least this similarity.

    The chance that texts of similarity s share one of b bands of r rows is 1 - (1 - s^r)^b. As in
    datasketch, b and r minimise the weighted sum of that chance below the threshold and of its
    complement above; misses weigh more, because every match is compared before it counts.
    """
    s = (np.arange(1000) + 0.5) / 1000
    below, above = s[s < jaccard], s[s >= jaccard]

    def error(count: int, rows: int) -> float:
        wrong = (1 - (1 - below**rows) ** count).sum()
        missed = ((1 - above**rows) ** count).sum()
        return float((1 - _MISS_WEIGHT) * wrong + _MISS_WEIGHT * missed)

    choices = ((b, r) for b in range(1, permutations + 1) for r in range(1, permutations // b + 1))
    return min(choices, key=lambda choice: error(*choice))


def band_keys(signatures: Signatures, bands: int, rows: int) -> U64:
    """Return a hash of each signature's bands, including the band's number: [texts, bands]."""
    factors = mix(np.arange(1, bands * rows + 1, dtype=np.uint64)) | np.uint64(1)
    values = signatures[:, : bands * rows].reshape(-1, bands, rows)
    return mix(np.einsum("tbr,br->tb", values, factors.reshape(bands, rows)))


def sketches(signatures: Signatures) -> Sketches:
    """Return the lowest byte of each minimum, enough to compare texts (Li and König 2010)."""
    return signatures.astype(np.uint8)


def similar(left: Sketches, right: Sketches, jaccard: float) -> npt.NDArray[np.bool_]:
    """Return whether the estimated similarity of each pair of rows reaches `jaccard`: [pairs]."""
    agreeing = np.count_nonzero(left == right, axis=1) / left.shape[1]
    similarity = (agreeing - _CHANCE) / (1 - _CHANCE)
    return np.asarray(similarity >= jaccard)

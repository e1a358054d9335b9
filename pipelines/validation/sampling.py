"""Which documents the costly checks look at: chosen by content, so alike in every run."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipelines.data.duplicates.shingles import mix, shingles, words

_SHINGLE_WORDS = 5


def content_draws(texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each text, shape [texts]; those below f are a sample of fraction f.

    It is the MinHash of the text by one hash function (Broder 1997), mixed again so that it is
    uniform whatever the text's length: two texts that share a part j of their shingles have the
    same number with probability j, so near-duplicates are mostly taken or left together, and their
    rate in the sample is about that of all texts. Some 400 MB of text a second.
    """
    hashes, offsets = shingles(*words(texts), _SHINGLE_WORDS)
    smallest = np.empty(len(texts), np.uint64)
    has_words = offsets[1:] > offsets[:-1]
    if has_words.any():
        smallest[has_words] = np.minimum.reduceat(hashes, offsets[:-1][has_words])
    for index in np.flatnonzero(~has_words).tolist():  # such as a row of dashes
        smallest[index] = int.from_bytes(hashlib.sha256(texts[index].encode()).digest()[:8])
    draws: npt.NDArray[np.float64] = mix(smallest) / 2.0**64
    return draws

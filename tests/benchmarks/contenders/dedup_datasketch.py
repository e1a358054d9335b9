"""datasketch at its best: `generator` (what `bulk` is) and the default affine32 permutations.

The hash of a shingle is datasketch's own, SHA-1, or xxhash, which is faster.
"""

import re
from pathlib import Path
from typing import Any

import xxhash
from datasketch import MinHash, MinHashLSH

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.dedup_truth import read_planted, read_texts, score

_WORD = re.compile(r"\w+")
_HASHES = {"sha1": None, "xxhash": xxhash.xxh32_intdigest}


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts, planted = read_texts(folder), read_planted(folder)

    def run_round() -> tuple[float, dict[str, Any]]:
        signatures = MinHash.generator(
            (shingles(text, options["ngram"]) for text in texts),
            num_perm=options["permutations"],
            hashfunc=_HASHES[options["hash"]],
        )
        index = MinHashLSH(threshold=options["jaccard"], num_perm=options["permutations"])
        dropped = []
        for number, signature in enumerate(signatures):
            if index.query(signature):
                dropped.append(number)
            else:
                index.insert(number, signature, check_duplication=False)
        return len(texts), score(planted, dropped)

    return run_round


def shingles(text: str, n: int) -> list[bytes]:
    words = _WORD.findall(text.lower())
    found = set(map(" ".join, zip(*(words[i:] for i in range(n)), strict=False)))
    return [shingle.encode() for shingle in found or {" ".join(words)}]


if __name__ == "__main__":
    serve(prepare)

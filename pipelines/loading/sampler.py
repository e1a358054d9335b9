"""Which samples a step trains on: a pure function, so the whole state of a loader is the step.

Epoch after epoch, the samples are read in the order of a keyed permutation: a Feistel network on
the smallest even number of bits that holds every index, walked again from any value beyond the
last index ("cycle walking", Black and Rogaway 2002). It takes no memory, whatever the number of
samples. The global order knows nothing of the number of processes: each takes its slice.

Positions are worked out a block at a time, for few cost as much as many; the last ones are kept.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_BLOCK = 4096  # positions
_ROUNDS = 8  # Also the order of a handful of samples should look shuffled.


def samples(
    seed: int, step: int, dp_rank: int, dp_world: int, global_batch: int, total: int
) -> Indices:
    """The sample indices that one process trains on at one step.

    Args:
        seed: Of the order.
        step: From 0.
        dp_rank: This process among the data-parallel ones.
        dp_world: How many of them there are.
        global_batch: Samples a step over all of them. Where they do not divide it, the first ones
            take one sample more.
        total: Samples in the dataset; each is read once an epoch.

    Returns:
        Indices in [0, total).
    """
    start, stop = share(dp_rank, dp_world, global_batch)
    position, last = step * global_batch + start, step * global_batch + stop
    found = []
    while position < last:
        epoch, place = divmod(position, total)
        block, skip = divmod(place, _BLOCK)
        part = _block(seed, epoch, block, total)[skip : skip + last - position]
        found.append(part)
        position += len(part)
    return np.concatenate(found) if found else np.empty(0, np.int64)


@lru_cache(maxsize=4)
def _block(seed: int, epoch: int, block: int, total: int) -> Indices:
    """The samples at a block of an epoch's positions."""
    positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, total), dtype=np.int64)
    return permute(positions, total, (seed, epoch))


def share(dp_rank: int, dp_world: int, global_batch: int) -> tuple[int, int]:
    """The slice of a global batch that belongs to one process: first sample, one past the last."""
    size, more = divmod(global_batch, dp_world)
    start = dp_rank * size + min(dp_rank, more)
    return start, start + size + (dp_rank < more)


def permute(values: Indices, total: int, key: tuple[int, ...]) -> Indices:
    """Map distinct values in [0, total) to distinct values in [0, total), by a key."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)  # bits of each half of a word
    round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    words = values.astype(np.uint64)
    outside = np.ones(len(words), dtype=bool)
    while outside.any():  # at most 4 times as many words as values: under 4 rounds on average
        words[outside] = _feistel(words[outside], half, round_keys)
        outside = words >= total
    return words.astype(np.int64)


def _feistel(words: _Words, half: int, round_keys: _Words) -> _Words:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> bits, words & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << bits) | right


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser: each bit of the result depends on each bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

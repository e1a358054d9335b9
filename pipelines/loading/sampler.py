"""Which samples a step trains on: a pure function, so the whole state of a loader is the step.

Epoch after epoch, the samples are read in the order of a keyed permutation: a Feistel network on
the smallest even number of bits that holds every index, walked again from any value beyond the
last index ("cycle walking", Black and Rogaway 2002). It takes no memory, whatever the number of
samples. The global order knows nothing of the number of processes: each takes its slice.

Of several datasets that are mixed by whole weights, say 7 and 3, each cycle of 10 samples holds 7
and 3 of them, in an order of its own; each dataset goes through epochs of its own as if alone.

Positions are worked out a block at a time, for few cost as much as many; the last ones are kept.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_BLOCK = 4096  # positions
_ROUNDS = 8  # Also the order of a handful of samples should look shuffled.
_CYCLES, _EPOCHS = 1, 2  # of a mixture: what a key is for
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step from one state to the next


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
    return _share_of(step, dp_rank, dp_world, global_batch, partial(_from, seed, total))


class Mixture(NamedTuple):
    """Datasets that are read together: of each its weight, and its samples."""

    weights: tuple[int, ...]
    totals: tuple[int, ...]


def mixed_samples(
    seed: int, step: int, dp_rank: int, dp_world: int, global_batch: int, mixture: Mixture
) -> Indices:
    """As `samples`, of several datasets.

    Of each `sum(weights)` samples in the global order, counted from the first, a dataset gives
    just as many as its weight; it gives each of its own once before any a second time.

    Returns:
        Indices in [0, sum(totals)): the datasets' samples are numbered one dataset after another.
    """
    return _share_of(step, dp_rank, dp_world, global_batch, partial(_mixed_from, seed, mixture))


def _share_of(
    step: int, dp_rank: int, dp_world: int, global_batch: int, order: Callable[[int], Indices]
) -> Indices:
    """One process's slice of a step; `order` gives some samples from a position on."""
    start, stop = share(dp_rank, dp_world, global_batch)
    position, last = step * global_batch + start, step * global_batch + stop
    found = []
    while position < last:
        part = order(position)[: last - position]
        found.append(part)
        position += len(part)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _from(seed: int, total: int, position: int) -> Indices:
    epoch, place = divmod(position, total)
    block, skip = divmod(place, _BLOCK)
    return _block(seed, epoch, block, total)[skip:]


def _mixed_from(seed: int, mixture: Mixture, position: int) -> Indices:
    block, skip = divmod(position, _cycles_a_block(mixture) * sum(mixture.weights))
    return _mixed_block(seed, block, mixture)[skip:]


@lru_cache(maxsize=4)
def _block(seed: int, epoch: int, block: int, total: int) -> Indices:
    """The samples at a block of an epoch's positions."""
    positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, total), dtype=np.int64)
    return permute(positions, total, (seed, epoch))


@lru_cache(maxsize=4)
def _mixed_block(seed: int, block: int, mixture: Mixture) -> Indices:
    """The samples at a block of a mixture's positions: of some whole cycles."""
    cycles = _cycles_a_block(mixture)
    of = _datasets(seed, np.arange(block * cycles, (block + 1) * cycles), mixture)
    found = np.empty(len(of), np.int64)
    first = 0
    for number, (weight, total) in enumerate(zip(*mixture, strict=True)):
        count = cycles * weight
        epochs, places = np.divmod(np.arange(block * count, (block + 1) * count), total)
        key = (seed, _EPOCHS, number)
        found[of == number] = first + _permute_in_turns(places, epochs, total, key)
        first += total
    return found


def _cycles_a_block(mixture: Mixture) -> int:
    return -(-_BLOCK // sum(mixture.weights))


def _datasets(seed: int, cycles: Indices, mixture: Mixture) -> Indices:
    """The number of the dataset at each position of some cycles, one after another.

    Each cycle is shuffled on its own, by random numbers: they are few enough to be sorted.
    """
    sorted_cycle = np.repeat(np.arange(len(mixture.weights)), mixture.weights)
    (key,) = np.random.SeedSequence((seed, _CYCLES)).generate_state(1, np.uint64)
    places = np.arange(len(sorted_cycle), dtype=np.uint64)
    random = _mix(_mix(key + cycles.astype(np.uint64))[:, None] + _mix(places))
    return sorted_cycle[np.argsort(random, axis=1, kind="stable")].ravel()


def share(dp_rank: int, dp_world: int, global_batch: int) -> tuple[int, int]:
    """The slice of a global batch that belongs to one process: first sample, one past the last."""
    size, more = divmod(global_batch, dp_world)
    start = dp_rank * size + min(dp_rank, more)
    return start, start + size + (dp_rank < more)


def permute(values: Indices, total: int, key: tuple[int, ...]) -> Indices:
    """Map distinct values in [0, total) to distinct values in [0, total), by a key."""
    return _walk(values, total, _round_keys(key))


def _permute_in_turns(values: Indices, turns: Indices, total: int, key: tuple[int, ...]) -> Indices:
    """As `permute`, but each value by the permutation of its turn: a block may be of many."""
    round_keys = _round_keys(key)
    each_turn, of = np.unique(turns, return_inverse=True)
    salts = _mix(each_turn.astype(np.uint64) * _GOLDEN)
    keys = _mix(round_keys[:, None] + salts)
    return _walk(values, total, keys[:, 0] if len(salts) == 1 else keys[:, of])


def _round_keys(key: tuple[int, ...]) -> _Words:
    return np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def _walk(values: Indices, total: int, round_keys: _Words) -> Indices:
    """Permute by round keys [rounds], or [rounds, values] where each value has its own."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)  # bits of each half of a word
    words = values.astype(np.uint64)
    outside = np.ones(len(words), dtype=bool)
    while outside.any():  # at most 4 times as many words as values: under 4 rounds on average
        keys = round_keys if round_keys.ndim == 1 else round_keys[:, outside]
        words[outside] = _feistel(words[outside], half, keys)
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

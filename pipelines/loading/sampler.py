"""Chooses the samples of a step by a pure function, so the step is a loader's whole state.

In each epoch, samples are read in the order of a keyed permutation: a Feistel network on the
smallest even number of bits that holds every index, applied again while its value is beyond the
last index ("cycle walking", Black and Rogaway 2002). It takes no memory for any number of samples.
The global order does not depend on the number of processes; each process takes its slice.

If several datasets are mixed by integer weights, such as 7 and 3, each cycle of 10 samples holds 7
and 3 of them in its own order; each dataset goes through its own epochs as if it were alone.

Positions are computed in blocks, as few cost as much as many; the last blocks are kept.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import UserError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_BLOCK = 4096  # positions
_ROUNDS = 8  # The order of only a few samples should look shuffled, too.
_CYCLES, _EPOCHS = 1, 2  # the uses of a mixture's keys
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step from one state to the next


def samples(
    seed: int, step: int, dp_rank: int, dp_world: int, global_batch: int, total: int
) -> Indices:
    """Return the sample indices that one process trains on at one step.

    Args:
        seed: The seed of the order.
        step: The step, counted from 0.
        dp_rank: The rank of this process among the data-parallel ones.
        dp_world: The number of data-parallel processes.
        global_batch: Samples a step over all processes. If it can't be divided evenly, the first
            processes take one sample more.
        total: Samples in the dataset; each is read once an epoch.

    Returns:
        Indices in [0, total).
    """
    return _share_of(step, dp_rank, dp_world, global_batch, partial(_from, seed, total))


class Mixture(NamedTuple):
    """The weights and numbers of samples of datasets that are read together."""

    weights: tuple[int, ...]
    totals: tuple[int, ...]


def mixed_samples(
    seed: int, step: int, dp_rank: int, dp_world: int, global_batch: int, mixture: Mixture
) -> Indices:
    """Return one process's samples of a step like `samples`, but from several datasets.

    In each run of `sum(weights)` samples of the global order, counted from the first, a dataset has
    as many as its weight; it gives each of its samples once before any a second time.

    Returns:
        Indices in [0, sum(totals)): the datasets' samples are numbered one dataset after another.
    """
    return _share_of(step, dp_rank, dp_world, global_batch, partial(_mixed_from, seed, mixture))


def _share_of(
    step: int, dp_rank: int, dp_world: int, global_batch: int, order: Callable[[int], Indices]
) -> Indices:
    """Return one process's slice of a step; `order` returns some samples from a position on."""
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
    """Return the samples at a block of an epoch's positions."""
    positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, total), dtype=np.int64)
    return permute(positions, total, (seed, epoch))


@lru_cache(maxsize=4)
def _mixed_block(seed: int, block: int, mixture: Mixture) -> Indices:
    """Return the samples at a block of a mixture's positions, which is some whole cycles."""
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
    """Return the number of the dataset at each position of the cycles, one after another.

    Each cycle is shuffled separately by sorting random numbers, as a cycle is short.
    """
    sorted_cycle = np.repeat(np.arange(len(mixture.weights)), mixture.weights)
    (key,) = np.random.SeedSequence((seed, _CYCLES)).generate_state(1, np.uint64)
    places = np.arange(len(sorted_cycle), dtype=np.uint64)
    random = _mix(_mix(key + cycles.astype(np.uint64))[:, None] + _mix(places))
    return sorted_cycle[np.argsort(random, axis=1, kind="stable")].ravel()


def share(dp_rank: int, dp_world: int, global_batch: int) -> tuple[int, int]:
    """Return the first sample of one process's slice of a global batch, and one past its last."""
    size, more = divmod(global_batch, dp_world)
    start = dp_rank * size + min(dp_rank, more)
    return start, start + size + (dp_rank < more)


def permute(values: Indices, total: int, key: tuple[int, ...]) -> Indices:
    """Map distinct values in [0, total) to distinct values in [0, total), by a key."""
    return _walk(values, total, _round_keys(key))


def _permute_in_turns(values: Indices, turns: Indices, total: int, key: tuple[int, ...]) -> Indices:
    """Permute each value by its own turn's permutation, as a block may span many turns."""
    round_keys = _round_keys(key)
    each_turn, of = np.unique(turns, return_inverse=True)
    salts = _mix(each_turn.astype(np.uint64) * _GOLDEN)
    keys = _mix(round_keys[:, None] + salts)
    return _walk(values, total, keys[:, 0] if len(salts) == 1 else keys[:, of])


def _round_keys(key: tuple[int, ...]) -> _Words:
    return np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def _walk(values: Indices, total: int, round_keys: _Words) -> Indices:
    """Permute by round keys [rounds], or [rounds, values] if each value has its own."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)  # bits of each half of a word
    words = values.astype(np.uint64)
    outside = np.ones(len(words), dtype=bool)
    while outside.any():  # up to 4 times as many words as values, so under 4 rounds on average
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
    """Mix words by SplitMix64's finaliser: each result bit depends on each bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def check_batch(global_batch: int, dp_world: int) -> None:
    """Check that each data-parallel process has a sample.

    Raises:
        UserError: there are more processes than samples.
    """
    if global_batch < dp_world:
        raise UserError(
            f"train.global_batch_size({global_batch}) is smaller than the {dp_world} data-parallel "
            "processes: each needs at least one sample a step; raise it, or lower resources.workers"
        )


def micro_batches(global_batch: int, dp_world: int, micro_batch: int) -> int:
    """Return the largest number of micro-batches that any data-parallel process has in a step."""
    return math.ceil(math.ceil(global_batch / dp_world) / micro_batch)

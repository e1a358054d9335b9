"""The seam between what a stage does and where it runs: an ordered map.

A stage asks for `map_ordered(function, items)` and never learns whether the calls ran here or on a
cluster. `ray_jobs.ray_map` gives the same results in the same order from any number of workers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class MapOrdered(Protocol):
    """Calls a picklable function on each item and yields the results in the items' order."""

    def __call__(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Results may be computed ahead; a caller that stops early cancels the rest."""
        ...


def map_in_process(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Run each call here, when its result is asked for."""
    return map(function, items)

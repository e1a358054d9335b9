"""Nothing is collected while a step is at work, and what is garbage goes between steps."""

import gc
import weakref

import pytest

from pipelines.training import profiling


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def leave_cycle() -> weakref.ref:
    return weakref.ref(Cycle())


def test_a_cycle_lives_until_it_is_collected():
    with profiling.only_between_steps():
        cycle = leave_cycle()
        [[] for _ in range(100_000)]  # far more than makes Python collect by itself
        assert cycle() is not None
        profiling.collect()
        assert cycle() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_afterwards_all_is_as_it_was(enabled):
    frozen = gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError), profiling.only_between_steps():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() is enabled
        assert bool(gc.get_freeze_count()) == bool(frozen)  # one that is frozen may be freed
    finally:
        gc.enable()


def test_what_is_imported_meanwhile_is_looked_through_once() -> None:
    with profiling.only_between_steps():
        kept = [[each] for each in range(1_000_000)]
        assert len(gc.get_objects()) >= len(kept)  # what the next collection looks through
        profiling.collect()
        assert len(gc.get_objects()) < len(kept)

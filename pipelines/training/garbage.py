"""Python's garbage is collected between steps, and at no other time.

Left alone, Python collects it in whichever thread has just made enough of it: on each process at
another time, while all others wait for its gradients; and in the midst of a backward pass, when
another thread saves a checkpoint. PyTorch tells the collector what a tensor's graph holds by
counts that change while autograd works, so that a collection then may take a live node for garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_between_steps() -> Iterator[None]:
    """In the block nothing is collected but by `collect`."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.collect()
    gc.freeze()  # what is left stays: it is not looked through each time
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect() -> None:
    """Call it where no graph is at work; it takes a few milliseconds."""
    gc.collect()

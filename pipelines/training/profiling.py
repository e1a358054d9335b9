"""A few steps under torch's profiler: for a trace, what talk between processes costs, and memory.

How long collectives run, and whether anything else runs meanwhile, can't be told without stopping
the device at each of them; so it is measured in a window of steps and holds for the run. The same
goes for the memory of a CPU, where torch counts no allocations unless it is profiled.

Python's garbage is collected between steps, and at no other time.

Left alone, Python collects it in whichever thread has just made enough of it: on each process at
another time, while all others wait for its gradients; and in the midst of a backward pass, when
another thread saves a checkpoint. PyTorch tells the collector what a tensor's graph holds by
counts that change while autograd works, so that a collection then may take a live node for garbage.
"""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


@contextmanager
def only_between_steps() -> Iterator[None]:
    """Let nothing but `collect` collect garbage within the block."""
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


_MEASURED = (2, 4)  # of this process's steps: compiled and warm by then
_ALLOCATING = (1, 2)  # of a process alone: moments are there from the first step on
_Spans = list[tuple[float, float]]


class Event(NamedTuple):
    """Something that ran for a while, on the host or the device."""

    name: str
    start: float
    end: float
    on_device: bool = False


class StepProfiler:
    """Profiles one window of steps; a context manager around them all.

    Attributes:
        communication_share: Of the window's time, in which collectives ran and nothing else;
            None until it is over.
        step_bytes: The most that the window's steps allocated beside what was there before; None
            until it is over, and on a GPU, which counts for itself.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, world: int) -> None:
        """Decide what is to be profiled.

        Args:
            steps: First step and one past the last that are written as a trace; None for none.
            folder: Where `rank-N.json.gz` goes, for chrome://tracing or Perfetto.
            rank: Of this process.
            world: How many there are; one alone has no collectives to measure.
        """
        self.communication_share: float | None = 0.0 if world == 1 else None
        self.step_bytes: int | None = None
        self._trace = steps
        self._path = folder / f"rank-{rank}.json.gz"
        self._world = world
        self._window = steps
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """A run that fails within the window: torch has one profiler in a process."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def before(self, step: int) -> None:
        """Begin where the window does."""
        accelerator = torch.accelerator.current_accelerator()
        if self._window is None:
            self._window = self._measured(step, on_cpu=accelerator is None)
        first, end = self._window
        if self._profiler is None and first <= step < end:
            kinds = [ProfilerActivity.CPU]
            if accelerator is not None and accelerator.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of its own on stderr
            self._profiler = profile(activities=kinds, profile_memory=accelerator is None)
            self._profiler.start()

    def _measured(self, step: int, *, on_cpu: bool) -> tuple[int, int]:
        """The window of a process whose first step this is, where no trace is asked for."""
        if self._world > 1:
            return step + _MEASURED[0], step + _MEASURED[1]
        return (step + _ALLOCATING[0], step + _ALLOCATING[1]) if on_cpu else (-1, -1)

    def after(self, step: int, *, last: bool) -> None:
        """End where the window does, or the run."""
        if self._profiler is None or self._window is None:
            return
        if step + 1 < self._window[1] and not last:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # once a run: kernels that are still to come
        self._profiler.stop()
        if not torch.accelerator.is_available():
            self.step_bytes = _allocated(self._profiler)
        if self._world > 1:
            self.communication_share = exposed_share(_events(self._profiler))
        if self._trace is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
        self._profiler, self._window = None, (-1, -1)


def exposed_share(events: Iterable[Event]) -> float:
    """The part of the time in which collectives run and nothing else computes.

    On a GPU both are kernels; on a CPU, gloo's work against torch's operators on any thread.
    """
    events = list(events)
    if on_device := [event for event in events if event.on_device]:
        talk = [event for event in on_device if "nccl" in event.name.lower()]
        work = [event for event in on_device if "nccl" not in event.name.lower()]
    else:
        talk = [event for event in events if event.name.startswith("gloo:")]
        work = [event for event in events if event.name.startswith("aten::")]
    working, all_of_it = _spans(work), _spans(talk + work)
    if not all_of_it:
        return 0.0
    whole = max(end for _, end in all_of_it) - min(start for start, _ in all_of_it)
    return (_length(_union(all_of_it)) - _length(_union(working))) / whole


def _events(profiler: profile) -> list[Event]:
    """Return the events of a profiler that has stopped; its own `events()` takes a second."""
    found = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = []
    for each in found:
        on_device = each.device_type() != DeviceType.CPU
        if not (on_device and each.is_user_annotation()):  # no kernel, but a name for several
            events.append(Event(each.name(), each.start_ns(), each.end_ns(), on_device))
    return events


def _allocated(profiler: profile) -> int:
    """The most bytes that were allocated since a profiler began, less those that were freed."""
    found: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(each.start_ns(), each.nbytes()) for each in found if each.name() == "[memory]"]
    sizes.sort(key=lambda event: event[0])
    most: int = max(accumulate((size for _, size in sizes), initial=0))
    return most


def _spans(events: list[Event]) -> _Spans:
    return [(event.start, event.end) for event in events]


def _union(spans: _Spans) -> _Spans:
    """The same time as spans that don't touch."""
    joined: _Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(spans: _Spans) -> float:
    return sum(end - start for start, end in spans)

"""Profiles a few steps with torch's profiler: for a trace, the cost of communication, and memory.

How long collectives run, and whether anything else runs meanwhile, can't be measured without
stopping the device at each collective; so it is measured in one window of steps and used for the
whole run. The same is true of a CPU's memory: torch counts its allocations only while profiling.

This module also collects Python's garbage between steps, and at no other time. By default, Python
collects it in the thread that has just made enough of it: at a different time on each process,
while all others wait for its gradients; or during a backward pass, when another thread saves a
checkpoint. PyTorch tells the collector by counts what a tensor's graph holds. The counts change
while autograd works, so a collection at that time may take a live node for garbage.
"""

import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from pipelines.training.hooks import Hook


@contextmanager
def only_between_steps() -> Iterator[None]:
    """Let only `collect` collect garbage within the block."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


_LONG = 0.01  # seconds; what a collection takes where little was made since the last freeze


def collect() -> None:
    """Collect garbage, in a few milliseconds; call it where no autograd graph is in use.

    MLflow's client is imported beside the first steps, with 130,000 objects that stay.
    """
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > _LONG:
        gc.freeze()


_MEASURED = (2, 4)  # steps of this process, when it is compiled and warm
_ALLOCATING = (1, 2)  # without other processes; moments exist after the first step
_Spans = list[tuple[float, float]]


class Event(NamedTuple):
    """Work that ran for some time, on the host or the device."""

    name: str
    start: float
    end: float
    on_device: bool = False


class StepProfiler(Hook):
    """Context manager around all steps that profiles one window of them.

    Attributes:
        communication_share: The part of the window's time in which only collectives ran; None
            until the window is over.
        step_bytes: The most bytes that the window's steps allocated in addition to earlier memory;
            None until the window is over, and on a GPU, where torch counts them anyway.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, world: int) -> None:
        """Decide what to profile.

        Args:
            steps: The first step of a trace and one past its last step; None for no trace.
            folder: The folder for `rank-N.json.gz`, for chrome://tracing or Perfetto.
            rank: The rank of this process.
            world: The number of processes; a single one has no collectives to measure.
        """
        self.communication_share: float | None = 0.0 if world == 1 else None
        self.step_bytes: int | None = None
        self._trace = steps
        self._path = folder / f"rank-{rank}.json.gz"
        self._world = world
        self._window = steps
        self._profiler: profile | None = None

    def __exit__(self, *_: object) -> None:
        """Stop the profiler if the run fails in the window: a process can have only one."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def before_step(self, step: int) -> None:
        """Start the profiler at the window's first step."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if self._window is None:
            self._window = self._measured(step, on_cpu=accelerator is None)
        first, end = self._window
        if self._profiler is None and first <= step < end:
            kinds = [ProfilerActivity.CPU]
            if accelerator is not None and accelerator.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no profiler lines on stderr
            self._profiler = profile(activities=kinds, profile_memory=accelerator is None)
            self._profiler.start()

    def _measured(self, step: int, *, on_cpu: bool) -> tuple[int, int]:
        """Return the window to use if no trace is asked for; `step` is the process's first."""
        if self._world > 1:
            return step + _MEASURED[0], step + _MEASURED[1]
        return (step + _ALLOCATING[0], step + _ALLOCATING[1]) if on_cpu else (-1, -1)

    def after_step(self, step: int, *, last: bool) -> None:
        """Stop the profiler at the end of the window or of the run."""
        if self._profiler is None or self._window is None:
            return
        if step + 1 < self._window[1] and not last:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # once a run: include the kernels that still run
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
    """Return the part of the time in which only collectives run, and nothing else computes.

    On a GPU both are kernels; on a CPU they are gloo's work and torch's operators on any thread.
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
        if not (on_device and each.is_user_annotation()):  # not a kernel, but a label for several
            events.append(Event(each.name(), each.start_ns(), each.end_ns(), on_device))
    return events


def _allocated(profiler: profile) -> int:
    """Return the peak of bytes allocated less bytes freed since the profiler began."""
    found: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(each.start_ns(), each.nbytes()) for each in found if each.name() == "[memory]"]
    sizes.sort(key=lambda event: event[0])
    most: int = max(accumulate((size for _, size in sizes), initial=0))
    return most


def _spans(events: list[Event]) -> _Spans:
    return [(event.start, event.end) for event in events]


def _union(spans: _Spans) -> _Spans:
    """Return the union of spans, as spans that do not touch."""
    joined: _Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(spans: _Spans) -> float:
    return sum(end - start for start, end in spans)

"""How long a process works in each phase of a step, without its waits for other processes.

Each collective waits for the last process, so that a whole step takes equally long on all of them,
and a host clock around its phases can't tell who is slow. What counts here is one's own work:

- On a CPU, the processor time of the training thread: a thread that waits for others has none.
- On a GPU, the time between CUDA events in one step of a slice: around each block's forward pass,
  in which nothing is exchanged under DDP, ZeRO and pipelines. Under tensor, context and expert
  parallelism blocks do exchange; there, a few matrix products before the step are timed instead.
- For data, a host clock around the loader alone.

Nothing here makes the host wait: events are read when it has waited for the device anyway.
"""

import time
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.training.hooks import Phase
from pipelines.training.slow_ranks import KEPT

PHASES: tuple[Phase, ...] = ("data", "forward and backward", "optimizer")
_PASSES, _UPDATE = 1, 2
SLICE = 3  # steps
_SAMPLED = 1  # the step of each slice that a GPU's events are in
_UNKNOWN = float("nan")
_PRODUCTS, _WIDTH = 20, 2048  # a millisecond on an A100 in bf16

_Spans = dict[int, list[list[torch.Event]]]  # pairs by phase


class _Slice(NamedTuple):
    """Some steps."""

    step: int  # the first one
    rows: list[list[float]]  # the seconds of each step by phase
    spans: _Spans  # what events are to tell in their place

    def seconds(self) -> list[float]:
        """Return the seconds of a step by phase; the device must have done the steps."""
        ordered = [sorted(each) for each in zip(*self.rows, strict=True)]
        middle = [each[(len(each) - 1) // 2] for each in ordered]
        # A host clock also counts when other programs have the processor: not in every step.
        middle[0] = ordered[0][0]
        for number, spans in self.spans.items():
            whole = [span for span in spans if len(span) == 2]  # not of what was not called
            spent = sum(begun.elapsed_time(ended) for begun, ended in whole) / 1e3
            middle[number] = spent if whole else _UNKNOWN
        return middle


class WorkClock:
    """Times this process's own work in slices of a few steps, of which the last ones are kept."""

    def __init__(self, model: Parallelized, recipe: Recipe) -> None:
        layout, ep = model.mesh.layout, recipe.parallel.ep
        self._model = model
        self._device = model.mesh.device
        self._dtype = COMPUTE_DTYPES.get(recipe.train.fixed_precision, torch.float32)
        self._on_cpu = self._device.type == "cpu"
        self._exchanges = layout.tp * layout.cp * ep > 1
        # Experts have as many tokens as their router sends them: what is unequal is not slow.
        self._is_uneven = self._on_cpu and ep > 1
        self.slices: deque[_Slice] = deque(maxlen=KEPT)
        self._rows: list[list[float]] = []
        self._now = [0.0] * len(PHASES)
        self._phase: Phase = "report"
        self._wall = self._busy = 0.0
        self._spans: _Spans | None = None  # of a step with events
        self._sampled: _Spans = {}
        self._handles: list[RemovableHandle] = []
        self._matrix: Tensor | None = None

    @property
    def measures_device(self) -> bool:
        """Whether a fixed amount of work is timed in place of a pass through the model."""
        return self._exchanges and not self._on_cpu

    def take(self) -> list[tuple[int, list[float]]]:
        """Return the first step of each new slice, and its seconds; the device has done them."""
        taken = [(each.step, each.seconds()) for each in self.slices]
        self.slices.clear()
        return taken

    def begin_step(self, step: int) -> None:
        """Begin with a step; on a GPU, mark the work of some."""
        self._now = [0.0] * len(PHASES)
        self._phase = "report"
        if self._on_cpu or step % SLICE != _SAMPLED:
            return
        self._spans = {_PASSES: [], _UPDATE: []}
        self._sampled = self._spans
        if self._exchanges:
            self._time_products()
        else:
            for part in self._model.modules:
                for block in part.layers.values():
                    self._time_first_call(block)

    def enter(self, phase: Phase) -> None:
        """Count from now on for this phase."""
        wall, busy = time.perf_counter(), time.thread_time()
        if self._phase == "data":
            self._now[0] += wall - self._wall
        elif self._phase in PHASES:
            self._now[PHASES.index(self._phase)] += busy - self._busy
        if phase == "optimizer" and self._spans is not None:
            self._spans[_UPDATE].append([self._mark()])
        self._phase, self._wall, self._busy = phase, wall, busy

    def end_step(self, step: int) -> None:
        """End the step, and the slice that it is the last one of."""
        self.enter("report")
        if self._spans is not None:
            self._spans[_UPDATE][-1].append(self._mark())
            for handle in self._handles:
                handle.remove()
            self._handles, self._spans = [], None
        if self._is_uneven:
            self._now[_PASSES] = _UNKNOWN
        self._rows.append(self._now)
        if step % SLICE == SLICE - 1:
            spans = {} if self._on_cpu else {_PASSES: [], _UPDATE: []} | self._sampled
            self.slices.append(_Slice(step + 1 - len(self._rows), self._rows, spans))
            self._rows, self._sampled = [], {}

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _time_first_call(self, block: nn.Module) -> None:
        """Mark both ends of its next forward pass, within what FSDP does before and after it."""
        span: list[torch.Event] = []

        def begin(*_: Any) -> None:
            if not span:
                span.append(self._mark())

        def end(*_: Any) -> None:
            if len(span) == 1:
                span.append(self._mark())

        self._sampled[_PASSES].append(span)
        self._handles.append(block.register_forward_pre_hook(begin))
        self._handles.append(block.register_forward_hook(end, prepend=True))

    def _time_products(self) -> None:
        """Have the device multiply matrices; the same on all processes, whatever their part is."""
        if self._matrix is None:
            self._matrix = torch.ones(_WIDTH, _WIDTH, dtype=self._dtype, device=self._device)
        begun = self._mark()
        for _ in range(_PRODUCTS if self._dtype.itemsize < 4 else 2):
            torch.mm(self._matrix, self._matrix)
        self._sampled[_PASSES].append([begun, self._mark()])

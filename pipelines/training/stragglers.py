"""Names the processes that the others wait for in each step, with their hardware.

Each process times its own work (`work_clock`). Where the host has waited for the device anyway,
these few numbers go to rank 0, which compares the processes that do the same (`slow_ranks`). Whom
the others have waited for too long is kept from the run, where other machines have room.
"""

import logging
import platform
import socket
import time
from typing import NamedTuple

import torch
from typing_extensions import override

from pipelines.loading.sampler import share
from pipelines.models.weights import local
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import from_all, numbers_from_all
from pipelines.recipe.recipe import Recipe
from pipelines.training.checkpoint.checkpointer import Checkpoints
from pipelines.training.hooks import Events, Hook, Phase
from pipelines.training.machines import Machines
from pipelines.training.slow_ranks import Sample, Slow, SlowRanks
from pipelines.training.work_clock import PHASES, WorkClock

NEW_SLICES = 2  # before numbers go to rank 0
# The share of a step that a process must lose to be worth naming.
LEAST: dict[Phase, float] = {"data": 0.05, "forward and backward": 0.01, "optimizer": 0.01}
TOO_LONG_S = 300.0  # that a process holds the others up: more than they lose by a new start

_log = logging.getLogger(__name__)


class _Facts(NamedTuple):
    """What the processes are told of one another."""

    name: str
    kind: str
    machine: str
    alike: tuple[int, ...]  # equal for processes that do the same
    samples: int  # in a step
    numbers: int  # that the optimizer updates


class Stragglers(Hook):
    """Compares the processes of a run; alone, it does nothing.

    Attributes:
        machines: Where the processes are; set before training begins.
    """

    def __init__(
        self, recipe: Recipe, model: Parallelized, checkpoints: Checkpoints, events: Events
    ) -> None:
        """`checkpoints` tells how long saves take; rank 0 notes slow processes in `events`."""
        self._is_alone = model.mesh.layout.world == 1
        self._recipe, self._model, self._checkpoints = recipe, model, checkpoints
        self._events = events
        self._clock = WorkClock(model, recipe)
        self.machines = Machines()
        self._facts: list[_Facts] = []
        self._lost: list[float] = []  # seconds for which each rank has held the others up
        self._is_mixed = False  # of unlike hardware, some of which is slow and sound
        self._compared: dict[str, SlowRanks] = {}
        self._saved = 0  # the step of the last save that was compared
        self._since = 0.0, 0  # when numbers last went to rank 0, and the steps since then

    @override
    def begin_training(self, step: int) -> None:
        if self._is_alone:
            return
        self._facts = facts = from_all(self._own_facts())
        self._lost = [0.0] * len(facts)
        self._is_mixed = len({each.kind for each in facts}) > 1
        samples = [each.samples for each in facts]
        same = [1] * len(facts)
        passes = same if self._clock.measures_device else samples
        work = {"data": samples, "forward and backward": passes, "checkpoint": same}
        work["optimizer"] = [each.numbers for each in facts]
        alike = [each.alike for each in facts]
        on = [each.name for each in facts]
        self._compared = {phase: SlowRanks(each, alike, on) for phase, each in work.items()}
        self._since = time.perf_counter(), 0

    def _own_facts(self) -> _Facts:
        mesh, train = self._model.mesh, self._recipe.train
        start, stop = share(mesh.dp_rank, mesh.dp_world, train.global_batch_size)
        # A later part of a sequence has more to attend to.
        part = 0 if self._clock.measures_device else mesh.coordinate("cp")
        numbers = max(1, sum(local(each).numel() for each in self._model.trained().values()))
        alike = mesh.coordinate("pp"), part
        who = hardware_name(mesh), hardware_kind(mesh.device), self.machines.here()
        return _Facts(*who, alike, stop - start, numbers)

    @override
    def before_step(self, step: int) -> None:
        if not self._is_alone:
            self._clock.begin_step(step)

    @override
    def enter_phase(self, step: int, phase: Phase) -> None:
        if not self._is_alone:
            self._clock.enter(phase)

    @override
    def after_step(self, step: int, *, last: bool) -> None:
        if not self._is_alone:
            self._clock.end_step(step)
            self._since = self._since[0], self._since[1] + 1

    @override
    def begin_window(self) -> None:
        """Send what is new to rank 0, now that the host has waited for the device."""
        if len(self._clock.slices) < NEW_SLICES:
            return
        slices = self._clock.take()
        step, seconds_a_gib = self._checkpoints.last_write or (self._saved, 0.0)
        mine = [seconds_a_gib, *(each for _, seconds in slices for each in seconds)]
        found = numbers_from_all(mine, self._model.mesh.device)
        if self._model.mesh.rank == 0:
            numbers = found.double().numpy()
            step_seconds = (time.perf_counter() - self._since[0]) / self._since[1]
            for number, (first, _) in enumerate(slices):
                for column, phase in enumerate(PHASES, 1 + number * len(PHASES)):
                    least = LEAST[phase] * step_seconds
                    self._compared[phase].add(Sample(first, numbers[:, column], least))
            if step > self._saved:
                self._compared["checkpoint"].add(Sample(step, numbers[:, 0], 0.0))
            self._tell()
            self._count(step_seconds, self._since[1])
        self._saved = step
        self._since = time.perf_counter(), 0

    def _tell(self) -> None:
        for phase, compared in self._compared.items():
            slow, recovered = compared.news()
            for each in slow:
                cause = self._sentence(each, phase)
                _log.warning("%s", cause)
                # It may come and go: the logbook has it once, the log each time.
                key = f"slow rank {each.rank} in {phase} on {self._facts[each.rank].name}"
                self._events.note("slow rank", key, cause, "training goes on", step=each.since)
            for rank in recovered:
                name = self._facts[rank].name
                _log.info("rank %d on %s is no longer slow in %s", rank, name, phase)

    def _count(self, step_seconds: float, steps: int) -> None:
        """Count what slow processes cost the others, and have one leave that costs too much."""
        for phase in PHASES:
            for each in self._compared[phase].slow:
                late = each.late
                if phase == "forward and backward":  # a GPU times only a part of them
                    late = step_seconds * (1 - 1 / each.ratio)
                self._lost[each.rank] += steps * late
        rank = max(range(len(self._lost)), key=self._lost.__getitem__)
        if self._lost[rank] < TOO_LONG_S or self._is_mixed:
            return
        who = self._facts[rank]
        cause = f"rank {rank} on {who.name} has held the others up for {self._lost[rank]:.0f} s"
        self._lost[rank] = 0.0  # where it can't leave, it is asked again after as long
        if self.machines.leave(who.machine, cause):
            done = "its node takes no more work; the run saves, and goes on on others"
            _log.warning("%s; %s", cause, done)
            self._events.note("slow rank", cause, cause, done)

    def _sentence(self, slow: Slow, phase: str) -> str:
        what = "a gigabyte of a checkpoint" if phase == "checkpoint" else phase
        name = self._facts[slow.rank].name
        return (
            f"rank {slow.rank} on {name} is slow since step {slow.since}: {what} takes "
            f"{slow.ratio:.2f} times as long as usual for the {slow.alike} ranks that do it"
        )


def hardware_name(mesh: Mesh) -> str:
    """Return the name of this process's host and device."""
    host = socket.gethostname()
    if mesh.device.type != "cuda":
        return f"{host} ({mesh.device.type.upper()})"
    properties = torch.cuda.get_device_properties(mesh.device)
    return f"{host} (GPU {mesh.device.index}, {properties.name}, {properties.uuid})"


def hardware_kind(device: torch.device) -> str:
    """Return a name that devices with the same kernels share."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} with {instructions} and {torch.get_num_threads()} threads"

"""The micro-batches of a step: of which samples, how many, and how many tokens they predict.

From the micro-batches of a step to its gradients.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from pipelines.loading.dataloader import IGNORED, Batch, TokenLoader
from pipelines.parallel.data_parallel import sync_if
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Train
from pipelines.training.guard import Guard
from pipelines.training.meter import Meter
from pipelines.training.precision import autocast
from pipelines.training.watchdog import Watchdog


class StepBatches:
    """A process's share of each step; the guard says which data a step sees."""

    def __init__(
        self,
        train: Train,
        mesh: Mesh,
        loader: TokenLoader,
        guard: Guard,
        meter: Meter,
        watchdog: Watchdog,
    ) -> None:
        """Take what is ready; the meter measures the waiting, the watchdog hears of each part."""
        self._train = train
        self._mesh = mesh
        self._loader = loader
        self._guard = guard
        self._meter = meter
        self._watchdog = watchdog
        self._number = micro_batches(train, mesh)

    def of(self, step: int) -> tuple[Iterable[tuple[Batch, bool]], int | Tensor]:
        """The micro-batches, and how many tokens all processes predict in this step.

        Where targets are masked, their number is known once all are read: a collective a step.
        """
        batches = evenly(self._awaited(step), self._number)
        if not self._loader.has_mask:
            return batches, self._loader.tokens_per_step
        held = list(batches)
        counts = [(batch.targets_BS != IGNORED).sum() for batch, _ in held]
        predicted = torch.stack(counts).sum()
        self._mesh.sum(predicted, "dp_replicate", "dp_shard")
        return held, predicted.clamp(min=1)  # nothing at all is learned from a step without any

    def digest(self, step: int) -> str:
        """A hash of the samples of the steps since the last multiple of `log_every`, in order."""
        first = (step - 1) // self._train.log_every * self._train.log_every
        return self._loader.digest([self._guard.data_step(each) for each in range(first, step)])

    def _awaited(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """The loader's micro-batches; the time it takes is measured."""
        for item in self._meter.waits(self._loader.micro_batches(self._guard.data_step(step))):
            self._watchdog.beat(step, "forward and backward")
            yield item
            self._watchdog.beat(step, "data")


def micro_batches(train: Train, mesh: Mesh) -> int:
    """The most that any process has: all need to call a sharded model equally often."""
    most = math.ceil(train.global_batch_size / mesh.dp_world)
    return math.ceil(most / train.fixed_micro_batch_size)


def evenly(batches: Iterable[tuple[Batch, bool]], number: int) -> Iterator[tuple[Batch, bool]]:
    """So many micro-batches, each with whether it is the last one; the last may predict nothing.

    Where processes don't divide the batch, some have a micro-batch more, but a sharded model has to
    be called by all of them equally often.
    """
    last = 0
    for last, (batch, _) in enumerate(batches, 1):
        yield batch, last == number
    for last in range(last + 1, number + 1):  # noqa: B020
        nothing = torch.full_like(batch.targets_BS, IGNORED)
        yield batch._replace(targets_BS=nothing), last == number


class ForwardBackward(Protocol):
    """Leaves the step's gradient in each parameter's `.grad`."""

    def __call__(self, batches: Iterable[tuple[Batch, bool]], share: Tensor | float) -> Tensor:
        """Run the micro-batches.

        Args:
            batches: This process's share of the step, each with whether it is the last one.
            share: What a token's loss counts: processes with tokens of their own ÷ tokens that
                all of them predict, as their gradients are averaged.

        Returns:
            The nats of this process's tokens, summed; 0 where another process has the loss.
        """


def forward_backward(recipe: Recipe, model: Parallelized, micro_batches: int) -> ForwardBackward:
    """Return what takes a step of so many micro-batches, by the recipe's precision and schedule."""
    train = recipe.train
    forward = autocast(train.precision, model.mesh.device)
    if model.mesh.layout.pp == 1:
        return Accumulation(model, forward)
    from pipelines.parallel.pipeline_steps import PipelineSteps

    return PipelineSteps(
        model,
        forward,
        recipe.parallel.schedule,
        micro_batches=micro_batches,
        samples=train.fixed_micro_batch_size,
    )


class Accumulation:
    """One micro-batch after the other; replicas exchange gradients in the last one only."""

    def __init__(self, model: Parallelized, autocast: AbstractContextManager[None]) -> None:
        (self._part,) = model.parts
        self._device = model.mesh.device
        self._autocast = autocast

    def __call__(self, batches: Iterable[tuple[Batch, bool]], share: Tensor | float) -> Tensor:
        """As the protocol says."""
        nats = torch.zeros((), device=self._device)
        for batch, is_last in batches:
            with sync_if(is_last, self._part):
                with self._autocast:
                    loss = self._part(batch.inputs_BS, batch.documents_BS, batch.targets_BS)
                torch.autograd.backward(loss * share)
            nats = nats + loss.detach()  # not in place: in the loss's precision
        return nats

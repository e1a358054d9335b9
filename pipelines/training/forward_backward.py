"""The micro-batches of a step, the number of tokens they predict, and the step's gradients."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from pipelines.loading.dataloader import IGNORED, Batch, Loader
from pipelines.parallel.data_parallel import sync_if
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.training.precision import autocast


class StepBatches:
    """This process's micro-batches of each step of the data."""

    def __init__(
        self,
        loader: Loader,
        mesh: Mesh,
        number: int,
        counted: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        """Keep the arguments.

        Args:
            loader: Reads the micro-batches.
            mesh: The processes that share a step.
            number: The micro-batches of a step, equally many on every process.
            counted: Returns the number of what the loss of a batch is a sum over; None: of its
                targets.
        """
        self._loader = loader
        self._mesh = mesh
        self.number = number
        self._counted = counted or _targets

    def of(
        self, step: int, before_sum: Callable[[], None] | None = None
    ) -> tuple[Iterable[tuple[Batch, bool]], int | Tensor]:
        """Return the micro-batches, and the number of tokens that all processes predict in a step,
        or of what else the loss is a sum over.

        Where targets are masked, the number is known only once all micro-batches are read, and it
        takes one collective a step, before which `before_sum` is called.
        """
        batches = evenly(self._loader.micro_batches(step), self.number)
        if not self._loader.has_mask:
            return batches, self._loader.tokens_per_step
        held = list(batches)
        if before_sum is not None:
            before_sum()
        predicted = torch.stack([self._counted(batch) for batch, _ in held]).sum()
        self._mesh.sum(predicted, "dp_replicate", "dp_shard")
        return held, predicted.clamp(min=1)  # a step without targets changes nothing


def seed_step(seed: int, step: int, token_rank: int) -> None:
    """Begin a step's random numbers: they resume correctly, and others can draw the same."""
    torch.manual_seed(hash((seed, step, token_rank)))


def _targets(batch: Batch) -> Tensor:
    return (batch.targets_BS != IGNORED).sum()


def evenly(batches: Iterable[tuple[Batch, bool]], number: int) -> Iterator[tuple[Batch, bool]]:
    """Yield `number` micro-batches, each with whether it is the last one.

    Where the processes don't divide the batch evenly, some have one micro-batch more; but all must
    call a sharded model equally often, so the others get extra ones that predict nothing.
    """
    last = 0
    for last, (batch, _) in enumerate(batches, 1):
        yield batch, last == number
    for last in range(last + 1, number + 1):  # noqa: B020
        nothing = torch.full_like(batch.targets_BS, IGNORED)
        yield batch._replace(targets_BS=nothing), last == number


class ForwardBackward(Protocol):
    """Callable that leaves the step's gradient in each parameter's `.grad`."""

    def __call__(self, batches: Iterable[tuple[Batch, bool]], share: Tensor | float) -> Tensor:
        """Run the micro-batches.

        Args:
            batches: This process's micro-batches, each with whether it is the last one.
            share: The weight of a token's loss: the number of processes with different tokens ÷
                the number of tokens that they all predict, as gradients are averaged over them.

        Returns:
            The sum of this process's loss in nats; 0 where another process has the loss.
        """

    def forward(self, batches: Iterable[tuple[Batch, bool]]) -> None:
        """Run the micro-batches without gradients, for what an objective sees of them."""


def forward_backward(recipe: Recipe, model: Parallelized, micro_batches: int) -> ForwardBackward:
    """Return the callable that runs a step with the recipe's precision and pipeline schedule."""
    train = recipe.train
    forward = autocast(train.fixed_precision, model.mesh.device)
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
    """Runs one micro-batch after another; replicas exchange gradients only in the last one."""

    def __init__(self, model: Parallelized, autocast: AbstractContextManager[None]) -> None:
        (self._part,) = model.parts
        self._device = model.mesh.device
        self._autocast = autocast

    def __call__(self, batches: Iterable[tuple[Batch, bool]], share: Tensor | float) -> Tensor:
        """Run the micro-batches as `ForwardBackward` describes."""
        nats = torch.zeros((), device=self._device)
        for batch, is_last in batches:
            with sync_if(is_last, self._part):
                with self._autocast:
                    inputs, targets, documents, reference = batch
                    loss = self._part(inputs, documents, targets, reference)
                torch.autograd.backward(loss * share)
            nats = nats + loss.detach()  # not in place, so that the sum has the loss's precision
        return nats

    @torch.no_grad()
    def forward(self, batches: Iterable[tuple[Batch, bool]]) -> None:
        """Run the micro-batches as `ForwardBackward` describes."""
        for (inputs, targets, documents, _), _ in batches:
            with self._autocast:
                self._part(inputs, documents, targets)

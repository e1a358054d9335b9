"""From the micro-batches of a step to its gradients."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from pipelines.core.recipe import Recipe
from pipelines.distributed.data_parallel import sync_if
from pipelines.loading.dataloader import Batch
from pipelines.models.parallelize import Parallelized
from pipelines.training.precision import autocast


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
    """Of a recipe's precision and schedule, for so many micro-batches a step on each process."""
    train = recipe.train
    forward = autocast(train.precision, model.mesh.device)
    if model.mesh.layout.pp == 1:
        return Accumulation(model, forward)
    from pipelines.training.pipeline_steps import PipelineSteps

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

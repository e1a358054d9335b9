"""From the micro-batches of a step to its gradients, where stages of a pipeline share the work."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.parallel.layout import Schedule
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.pipeline_parallel import Pipeline, add_over_ends


class PipelineSteps:
    """Stages run micro-batches in the schedule's order; gradients are exchanged at its end."""

    def __init__(
        self,
        model: Parallelized,
        autocast: AbstractContextManager[None],
        schedule: Schedule,
        *,
        micro_batches: int,
        samples: int,
    ) -> None:
        """Join this process's stages to the others'.

        Args:
            model: Its parts are the stages.
            autocast: Around each forward pass.
            schedule: The order.
            micro_batches: In a step, the same in every process.
            samples: In a micro-batch; one with fewer is filled up.

        Raises:
            UserError: the schedule can't run so many micro-batches.
        """
        for part in model.parts:
            part.forward = _under(autocast, part.forward)
        self._model = model
        self._micro_batches = micro_batches
        self._samples = samples
        self._share: Tensor | float = 0.0
        self._nats: list[Tensor] = []
        # In the loss's precision, as processes add theirs up.
        dtype = torch.promote_types(model.parameters()[0].dtype, torch.float32)
        self._nothing = torch.zeros((), dtype=dtype, device=model.mesh.device)
        self._pipeline = Pipeline(model.parts, model.mesh, schedule, micro_batches, self._loss)

    def __call__(self, batches: Iterable[tuple[Batch, bool]], share: Tensor | float) -> Tensor:
        """As `ForwardBackward` says."""
        self._share = share
        self._nats.clear()
        self._pipeline.step(_joined([batch for batch, _ in batches], self._samples))
        tied = self._model.tied_over_stages()
        if tied is not None and tied.grad is not None:
            add_over_ends(tied.grad, self._model.mesh)
        # Its first step runs one micro-batch more, before the others, to learn the shapes.
        nats = self._nats[-self._micro_batches :]
        return torch.stack(nats).sum() if nats else self._nothing.clone()

    def forward(self, batches: Iterable[tuple[Batch, bool]]) -> None:
        """As `ForwardBackward` says."""
        rows = _joined([batch for batch, _ in batches], self._samples)
        self._pipeline.step(rows, backward=False)

    def _loss(self, nats: Tensor, _: Tensor) -> Tensor:
        """Return the loss of the last stage, which computed it from the targets given by name."""
        self._nats.append(nats.detach().clone())
        return nats * self._share


def _joined(batches: list[Batch], samples: int) -> dict[str, Tensor]:
    """Return all rows of a step, by name; stages exchange tensors of one shape, so added rows
    predict nothing.
    """
    return {
        name: torch.cat([_filled(each, samples, _ADDED.get(name, 0)) for each in column])
        for name, column in zip(Batch._fields, zip(*batches, strict=True), strict=True)
        if column[0] is not None
    }


_ADDED = {"targets_BS": IGNORED}


def _filled(rows: Tensor, number: int, value: int) -> Tensor:
    return pad(rows, (0, 0, 0, number - len(rows)), value=value)


def _under(
    context: AbstractContextManager[None], forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(*args: Tensor, **by_name: Tensor) -> Tensor:
        with context:
            return forward(*args, **by_name)

    return run

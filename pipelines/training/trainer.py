"""The training loop; it runs under torchrun, Ray Train or alone, and knows of none of them."""

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.loading.dataloader import IGNORED, Batch, TokenLoader
from pipelines.models.parallelize import Parallelized
from pipelines.training import checkpoint
from pipelines.training.checkpoint import Position
from pipelines.training.forward_backward import Accumulation, ForwardBackward
from pipelines.training.metrics import Report, StepMetrics
from pipelines.training.optimizer import build_optimizer, learning_rate, set_learning_rate

_log = logging.getLogger(__name__)


class _Step(NamedTuple):
    """What came of one step."""

    nats: Tensor  # of this process, summed
    norm: Tensor  # of the gradient
    predicted: int | Tensor  # tokens, of all processes


class Trainer:
    """Fits a model to the batches of a loader.

    What a step does depends on the recipe, the step and the state before it and on nothing else,
    so on the same hardware a resumed run is bit-identical to an uninterrupted one.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Parallelized,
        loader: TokenLoader,
        report: Report,
        checkpoints: Path,
    ) -> None:
        """Take what is ready.

        Args:
            recipe: `seed` and `train` are used.
            model: Trained in place.
            loader: This process's share of each step.
            report: Called on every process every `train.log_every` steps, at each checkpoint and
                at the end.
            checkpoints: A folder that all processes share.
        """
        self.recipe = recipe
        self.train = recipe.train
        self.loader = loader
        self.report = report
        self.checkpoints = checkpoints
        self.model = model
        self.mesh = model.mesh
        self.device = model.mesh.device
        self.optimizer = build_optimizer(model, self.train)
        self.forward_backward: ForwardBackward = Accumulation(model, self._autocast())

    def fit(self) -> Position:
        """Train to the last step or the time limit, and return how far that was.

        Raises:
            UserError: the loss is no number any more.
        """
        position = since = self._resume()  # since: the last report
        for part in self.model.parts:
            part.train()
        finished = self._finished(position)
        while not finished:
            started = time.perf_counter()
            done = self._step(position.step)
            seconds = position.seconds + time.perf_counter() - started
            position = Position(position.step + 1, seconds)
            finished = self._finished(position)
            saves = finished or position.step % self.train.checkpoint_every == 0
            if saves or position.step % self.train.log_every == 0:
                self.report(self._metrics(done, position, since, finished))
                since = position
            if saves:
                checkpoint.save(self.checkpoints, position, self.model, self.optimizer)
        return position

    def _step(self, step: int) -> "_Step":
        """One optimizer step over this process's share of the batch."""
        # Seeded by step, randomness resumes by itself and on any number of processes.
        torch.manual_seed(hash((self.recipe.seed, step, self.mesh.dp_rank)))
        set_learning_rate(self.optimizer, learning_rate(step, self.train))
        self.optimizer.zero_grad()
        batches, predicted = self._batches(step)
        # Each token weighs the same wherever it is; the mean over processes is taken later.
        nats = self.forward_backward(batches, self.mesh.dp_world / predicted)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.train.grad_clip)
        self.optimizer.step()
        return _Step(nats, norm, predicted)

    def _batches(self, step: int) -> tuple[Iterable[tuple[Batch, bool]], int | Tensor]:
        """The micro-batches, and how many tokens all processes predict in this step.

        Where targets are masked, their number is known once all are read: a collective a step.
        """
        batches = self.loader.micro_batches(step)
        if not self.loader.has_mask:
            return batches, self.loader.tokens_per_step
        held = list(batches)
        counts = [(batch.targets_BS != IGNORED).sum() for batch, _ in held]
        predicted = torch.stack(counts).sum()
        self.mesh.sum(predicted, "dp_replicate", "dp_shard")
        return held, predicted.clamp(min=1)  # nothing at all is learned from a step without any

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16"
        )

    def _metrics(
        self, done: "_Step", position: Position, since: Position, last: bool
    ) -> StepMetrics:
        """Note: a collective and a device synchronisation point, so not at every step."""
        self.mesh.sum(done.nats, "pp", "dp_replicate", "dp_shard")
        tokens = self.loader.tokens_per_step
        loss = done.nats.item() / int(done.predicted)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {position.step}; lower train.lr({self.train.lr}) or "
                f"raise train.warmup_steps({self.train.warmup_steps})"
            )
        steps, seconds = position.step - since.step, position.seconds - since.seconds
        return StepMetrics(
            step=position.step,
            tokens=position.step * tokens,
            loss=loss,
            learning_rate=learning_rate(position.step - 1, self.train),
            gradient_norm=done.norm.item(),
            step_seconds=seconds / steps,
            tokens_per_second=steps * tokens / seconds,
            last=last,
        )

    def _finished(self, position: Position) -> bool:
        """Whether to stop; rank 0's clock decides, so that all stop at the same step."""
        limit = self.train.max_seconds
        finished = position.step >= self.train.steps
        if limit is None or self.mesh.layout.world == 1:
            return finished or (limit is not None and position.seconds >= limit)
        flag = torch.tensor(finished or position.seconds >= limit, device=self.device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def _resume(self) -> Position:
        path = checkpoint.latest_complete(self.checkpoints)
        if path is None:
            return Position()
        position = checkpoint.load(path, self.model, self.optimizer)
        _log.info("resumed after step %d from %s", position.step, path)
        return position

"""What the model that training starts from says of each answer: computed once, before training.

The model itself is the reference until its first step, with new adapters too, so that no second one
is held. A process that starts again finds the file, and so does each run with the same base, data
and arithmetic, such as the members of a sweep.
"""

# ruff: noqa: N803, N806 (names that end in their shape)

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.sources.readers import Numbers
from pipelines.parallel.process_group import from_all
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Train
from pipelines.run.records import DatasetRef
from pipelines.training.checkpoint.state import identity
from pipelines.training.preference import PairLoss
from pipelines.training.trainer import Trainer

_log = logging.getLogger(__name__)
_EVERY_S = 5.0  # between two lines of the log
# How a model learns from its answers, and for how long, changes nothing that it said before.
_LEARNING = (
    *("steps", "global_batch_size", "optimizer", "lr", "lr_schedule", "min_lr_ratio"),
    *("warmup_steps", "weight_decay", "beta1", "beta2", "grad_clip", "balance_loss"),
    *("balance_rate", "z_loss", "spike_sigma", "max_bad_steps"),
)


def reference_name(recipe: Recipe, dataset: DatasetRef, code: object) -> str:
    """Return the name of the file with what a recipe's first model says of a dataset's answers.

    What a run may go on with, but would compute by other kernels or code, has another name.

    Args:
        recipe: Of the run, with what it was resolved to.
        dataset: Its answers.
        code: The fingerprint of the training's code.
    """
    usual = Train()
    train = recipe.train.model_copy(update={key: getattr(usual, key) for key in _LEARNING})
    values = {"train": train, "preference": Preference(), "seed": 0}
    asked = identity(recipe.model_copy(update=values), dataset)
    kernels = [recipe.train.fixed_compile, recipe.train.attention, torch.__version__]
    text = json.dumps([asked, kernels, code], sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}.npy"


def use_reference(trainer: Trainer, path: Path) -> None:
    """Give a trainer's loader the reference's log-likelihoods; all processes call it before `fit`.

    Args:
        trainer: Its model has the weights that training starts from.
        path: A `.npy` file that all processes share, fp32 [samples, conversations of a sample]; it
            is made if it does not exist.
    """
    loss, loader = trainer.objective, trainer.loader
    if not isinstance(loss, PairLoss) or not isinstance(loader, TokenLoader):
        raise ValueError("only pairs have a reference")
    if any(from_all(path.is_file())):
        if trainer.mesh.rank == 0:
            path.touch()  # `penstock gc` keeps what runs use
    else:
        logs_NM = _measure(trainer, loss, loader)
        if trainer.mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{uuid4().hex}.npy")  # another run may write, too
            with unfinished.open("wb") as file:
                np.save(file, logs_NM)
                os.fsync(file.fileno())
            unfinished.replace(path)
        from_all(None)  # it is there for all
    loader.reference = np.load(path, mmap_mode="r")


class _Answers:
    """An `Objective` that keeps the log-likelihood of each answer; its own loss means nothing."""

    def __init__(self, loss: PairLoss) -> None:
        self._loss = loss
        self.logs_BM: list[Tensor] = []

    def __call__(
        self,
        nats_BS: Tensor,
        targets_BS: Tensor,  # noqa: ARG002
        documents_BS: Tensor,
        known_BK: Tensor | None,  # noqa: ARG002
    ) -> Tensor:
        """Keep those of a micro-batch."""
        self.logs_BM.append(self._loss.of_conversations(-nats_BS, documents_BS).detach())
        return nats_BS.sum()


def _measure(
    trainer: Trainer, loss: PairLoss, loader: TokenLoader
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return the log-likelihoods of all samples' answers, [N, M]; all processes call it."""
    mesh = trainer.mesh
    samples, micro = loader.samples, trainer.train.fixed_micro_batch_size
    here = micro * trainer.batches.number  # of a step, in this process
    steps = -(-samples // (here * mesh.dp_world))
    logs_NM = np.zeros((samples, loss.conversations), np.float32)
    answers = _Answers(loss)
    told = time.monotonic()
    for decoder in trainer.model.modules:
        decoder.objective = answers
        decoder.eval()
    for step in range(steps):
        first = (step * mesh.dp_world + mesh.dp_rank) * here
        rows: Numbers = np.arange(first, first + here)
        batches = [
            (loader.read(some % samples), False)  # rows beyond the last are read, and left out
            for some in np.split(rows, trainer.batches.number)
        ]
        trainer.forward_backward.forward(batches)
        # A pipeline's first step runs one micro-batch more, before the others.
        kept_BM = answers.logs_BM[-trainer.batches.number :]
        answers.logs_BM.clear()
        mine = torch.cat(kept_BM).float().cpu().numpy() if kept_BM else None
        for numbers, found_NM in from_all((rows, mine)):
            if found_NM is not None:
                there = numbers < samples
                logs_NM[numbers[there]] = found_NM[: len(numbers)][there]
        if time.monotonic() > told + _EVERY_S and mesh.rank == 0:
            told = time.monotonic()
            _log.info("reference: step %d of %d", step + 1, steps)
    for decoder in trainer.model.modules:
        decoder.objective = loss
    return logs_NM

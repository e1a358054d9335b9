"""Who samples the answers that a model learns from, and with which model."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pipelines.models.config import DecoderConfig
from pipelines.models.initial_model import build_model, fill_model
from pipelines.models.transformer import Transformer
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.answer_sampler import Sampler
from pipelines.reinforcement.rollout_loader import InThisProcess, RolloutLoader, Samplers
from pipelines.run.records import PreprocessRecord, output_folder
from pipelines.training.hooks import Events

_log = logging.getLogger(__name__)
MakeSampler = Callable[[torch.device], Sampler]
StartSamplers = Callable[[MakeSampler, int], Samplers]


def begin_rollouts(
    loader: RolloutLoader,
    model: Parallelized,
    shape: DecoderConfig,
    workspace: Path,
    events: Events,
    start: StartSamplers | None,
) -> None:
    """Give a loader who samples; all processes call it.

    Args:
        loader: Of the answers.
        model: What is trained.
        shape: The model's.
        workspace: Has the tokenizer.
        events: Is told of alarms.
        start: Starts so many processes that sample; None where there can be none.
    """
    recipe, mesh = loader.recipe, model.mesh
    tokenizer = output_folder(workspace, PreprocessRecord.stage) / "tokenizer"
    make = partial(_sampler, recipe, shape, tokenizer)
    samplers: Samplers | None = None
    if mesh.rank == 0:
        number = recipe.reinforcement.samplers
        if number and start is None:
            _log.warning(
                "reinforcement.samplers = %d, but there is no Ray here: this process samples the "
                "same answers itself",
                number,
            )
        samplers = start(make, number) if number and start else InThisProcess(make(mesh.device))
    loader.begin(model, samplers, events)


def _sampler(
    recipe: Recipe, shape: DecoderConfig, tokenizer: Path, device: torch.device
) -> Sampler:
    def model() -> Transformer:
        made = build_model(recipe, shape)
        made.to_empty(device=device)
        fill_model(recipe, made)
        return made

    return Sampler(recipe, tokenizer, model, device)

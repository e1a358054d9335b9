"""The most bytes that real steps of this project hold, as torch's allocators count them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from pipelines.data.tokens.token_shards import ShardWriter, token_dtype
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import add_adapters, chosen_sizes, init_adapters
from pipelines.models.transformer import Transformer
from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.planning.memory_training import Training
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.checkpoint.checkpointer import Position
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from pipelines.training.trainer import Trainer

ALONE = Layout()
_BUILT = "the trainer is built"
STEPS = 2  # moments are there from the second on


def peak_bytes(
    config: DecoderConfig,
    recipe: Recipe,
    device: torch.device,
    folder: Path,
    layout: Layout = ALONE,
) -> int:
    """Build a model and its trainer, do `STEPS` steps, and return what they held at most.

    On the CPU every allocation of torch's allocator is added up, as the profiler reports them; on
    CUDA it is `max_memory_allocated`.
    """
    gc.collect()  # what is freed meanwhile must have been allocated meanwhile
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _trained(_trainer(config, recipe, device, folder, layout))
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = _trainer(config, recipe, device, folder, layout)
        with torch.profiler.record_function(_BUILT):
            pass
        _trained(trainer)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    built = [each.name() for each in events].index(_BUILT)  # a model is whole before it is divided
    held = np.cumsum([each.nbytes() if each.name() == "[memory]" else 0 for each in events])
    return int(held[built:].max())


def reported(config: DecoderConfig, recipe: Recipe, folder: Path) -> list[StepMetrics]:
    """What a whole run on the CPU tells of itself."""
    gc.collect()  # of the tests before: freed during a step, it would make that step look small
    points: list[StepMetrics] = []
    trainer = _trainer(config, recipe, torch.device("cpu"), folder, ALONE)
    trainer.profiler = StepProfiler(None, folder, rank=0, world=1)
    trainer.report = points.append
    with _one_thread():
        trainer.fit()
    return points


def training_of(recipe: Recipe, *, on_cpu: bool, layout: Layout = ALONE) -> Training:
    """What the formulas are told of such a run."""
    train = recipe.train
    return Training(
        layout,
        recipe.parallel.sharding,  # type: ignore[arg-type]
        micro_batch=train.fixed_micro_batch_size,
        micro_batches=train.global_batch_size // layout.dp // train.fixed_micro_batch_size,
        sequence=recipe.data.sequence_length,
        precision=train.precision,
        activation_checkpoint=train.activation_checkpoint,
        adapter=recipe.adapter,
        optimizer=train.optimizer,
        compiled=train.compile,
        on_cpu=on_cpu,
    )


def _trained(trainer: Trainer) -> None:
    with trainer.watchdog, _one_thread():
        for step in range(STEPS):
            trainer._step(Position(step))


def _trainer(
    config: DecoderConfig, recipe: Recipe, device: torch.device, folder: Path, layout: Layout
) -> Trainer:
    model, mesh = _model(config, recipe, device), build_mesh(layout, device)
    split = _split(folder, config.vocab_size, recipe)
    tokens = TokenDataset(folder, split, recipe.data.sequence_length)
    loader = TokenLoader.of(tokens, recipe, mesh)
    laid = parallelize(model, mesh, recipe)
    trainer = Trainer(recipe, laid, loader, _ignore, folder / "checkpoints", folder / "diagnostics")
    trainer.profiler = StepProfiler((STEPS, STEPS + 1), folder, rank=0, world=1)  # there is one
    return trainer


def _model(config: DecoderConfig, recipe: Recipe, device: torch.device) -> Transformer:
    model = Transformer(config)
    model.init_weights(0)
    if recipe.adapter.kind != "none":
        dtype = COMPUTE_DTYPES.get(recipe.train.precision, torch.float32)
        add_adapters(model, chosen_sizes(model, recipe.adapter), recipe.adapter, dtype)
        init_adapters(model, 0)
    return model.to(device)


def _split(folder: Path, vocabulary: int, recipe: Recipe) -> Split:
    tokens = (STEPS + 1) * recipe.train.global_batch_size * recipe.data.sequence_length
    writer = ShardWriter(folder / "train-00000", vocab_size=vocabulary)
    writer.add((np.arange(tokens) ** 2 % vocabulary).astype(token_dtype(vocabulary)))
    return Split(documents=1, bytes=tokens, tokens=tokens, shards=(writer.close(),))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _ignore(_metrics: Any) -> None:
    """Nothing is reported."""

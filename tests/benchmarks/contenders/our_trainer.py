"""Penstock's Trainer over token shards in a folder, as contenders of several benchmarks use it."""

import gc
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.initial_model import build_model, fill_randomly
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from pipelines.training.precision import set_precision
from pipelines.training.trainer import Trainer
from tests.settled import FP32


@dataclass
class Built:
    """A trainer, its model, and what it reported."""

    trainer: Trainer
    model: Transformer
    points: list[StepMetrics]


def build_trainer(
    folder: Path,
    split: Split,
    shape: DecoderConfig,
    sections: dict[str, Any],
    device: torch.device | None = None,
    scratch: str = "run",
    *,
    saves: bool = False,
) -> Built:
    """A trainer that begins at step 0 and saves nothing, unless it is to.

    Args:
        folder: With the split's shards; `scratch` in it is emptied for the run's heartbeats.
        split: What to train on.
        shape: With vocabulary and context.
        sections: Of the recipe.
        device: The CPU by default.
        scratch: A name of its own for each contender.
        saves: It saves into `scratch`, and goes on from what is there.
    """
    train = FP32 | sections.get("train", {})
    recipe = Recipe.model_validate({"name": "bench", **sections, "train": train})
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), device or torch.device("cpu"))
    documents = recipe.data.document_mask
    tokens = TokenDataset(folder, split, shape.context_length, documents=documents)
    loader = TokenLoader.of(tokens, recipe, mesh)
    set_precision(recipe.train, mesh.device)
    model = build_model(recipe, shape)
    parallelized = parallelize(model, mesh, recipe, partial(fill_randomly, seed=recipe.seed))
    points: list[StepMetrics] = []
    run = folder / scratch
    if mesh.rank == 0 and not saves:
        shutil.rmtree(run, ignore_errors=True)
    trainer = Trainer(recipe, parallelized, loader, points.append, run / "checkpoints", run)
    if not saves:  # what is timed is training: a large model's save may take longer than the steps
        trainer.checkpoints.save = lambda position: None  # type: ignore[method-assign]
    return Built(trainer, parallelized.modules[0], points)


def free(device: torch.device) -> None:
    """Give a GPU's memory back, for the contenders whose turn is next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

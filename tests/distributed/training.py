"""A tiny model through the real trainer, over the processes that there are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import Mesh, build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from pipelines.training.reference import use_reference
from pipelines.training.trainer import Trainer
from tests.settled import FP32

STEPS = 20
LENGTH = 16
SHAPE = {
    "layers": 4,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 64,
    "vocab_size": 64,
    "context_length": LENGTH,
}


@dataclass(frozen=True)
class Case:
    """A way to train; the loss must be that of one process.

    Attributes:
        name: Of the test.
        world: Processes.
        parallel: Of the recipe.
        train: Of the recipe; both the case and the single process take it.
        only_here: Of `train`, too, but not for the single process it is compared with.
        model: Of the model's shape.
        documents: Whether a token sees its own document only.
        slow: Left to the proof, though two processes do.
        preference: Of the recipe.
    """

    name: str
    world: int
    parallel: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    only_here: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    documents: bool = False
    slow: bool = False
    preference: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, *, alone: bool) -> Recipe:
        """Of the case, or of the single process that it is compared with."""
        train = FP32 | {
            "steps": STEPS,
            "warmup_steps": 4,
            "lr": 1e-2,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "log_every": 1,
            "checkpoint_every": 1000,
        }
        train |= self.train
        sections: dict[str, Any] = {"name": "case", "train": train}
        if self.preference:
            pairs = {"instruction": {"kind": "preference"}, "packing": "best_fit"}
            sections |= {"preference": self.preference, "data": pairs | {"document_mask": True}}
        if alone:
            return Recipe.model_validate(sections)
        return Recipe.model_validate(
            sections | {"parallel": self.parallel, "train": train | self.only_here}
        )


def small(case: Case) -> Case:
    """The case with as little to compute as shows the same, for a step's time is that of its
    layers and micro-batches.

    Two layers are each other's neighbours as four are; only a pipeline's stages have two each. Two
    processes have several micro-batches to add up even if they take two samples at a time.
    """
    model = case.model if "pp" in case.parallel else {"layers": 2, **case.model}
    train = {"micro_batch_size": 2, **case.train} if case.world == 2 else case.train
    return replace(case, model=model, train=train)


def make_data(folder: Path, *, masked: bool = False) -> Split:
    """Four thousand tokens with something in them to learn, in documents shorter than a sample."""
    numbers = np.arange(4000)
    sizes = np.diff([0, *range(7, 4000, 11), 4000])
    mask = (numbers % 48 < 21).astype(np.uint8) if masked else None  # some samples have no target
    writer = ShardWriter(folder / "train-00000", vocab_size=64, masked=masked)
    writer.add((numbers**2 % 61).astype(np.uint16), sizes, mask)
    return Split(documents=len(sizes), bytes=4000, tokens=4000, shards=(writer.close(),))


def make_pairs(folder: Path, *, labelled: bool = False) -> Split:
    """Pairs of answers, one of which counts up: some of two to a sample, some of one.

    Of labelled ones one answer of each pair has no targets.
    """
    draw = np.random.default_rng(0)
    writer = ShardWriter(folder / "train-00000", vocab_size=64, masked=True)
    for number in range(400):
        lengths = (5, 3, 4, 4) if number % 2 else (10, 6)
        for place, length in enumerate(lengths):
            start, step = draw.integers(60), draw.integers(3, 20) if place % 2 else 1
            ids = (start + step * np.arange(length)) % 61
            there = not labelled or (number + place // 2) % 2 == place % 2
            mask = (np.arange(length) >= 2) & there
            writer.add(ids.astype(np.uint16), mask=mask.astype(np.uint8))
    ids = np.zeros(1, np.uint16)
    writer.add(ids, mask=ids.astype(np.uint8))
    return Split(documents=1201, bytes=6401, tokens=6401, shards=(writer.close(),))


def build_loader(case: Case, recipe: Recipe, data: tuple[Path, Split], mesh: Mesh) -> TokenLoader:
    """Of this process's share of the data."""
    return TokenLoader.of(TokenDataset(*data, LENGTH, documents=case.documents), recipe, mesh)


def build_trainer(
    case: Case,
    data: tuple[Path, Split],
    checkpoints: Path,
    points: list[StepMetrics],
    dtype: torch.dtype,
) -> Trainer:
    """The case's trainer in this process; without a process group, that of one process alone."""
    recipe = case.recipe(alone=not dist.is_initialized())
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), torch.device("cpu"))
    loader = build_loader(case, recipe, data, mesh)
    with torch.device("meta"):
        model = Transformer(DecoderConfig(**{**SHAPE, **case.model})).to(dtype)
    model = parallelize(model, mesh, recipe, lambda part: part.init_weights(recipe.seed))
    with patch("pipelines.training.precision._need"):  # a CPU rounds as fp8 does, but slowly
        trainer = Trainer(recipe, model, loader, points.append, checkpoints, checkpoints)
    # Its window under the profiler takes longer than all of these steps.
    trainer.profiler = StepProfiler(None, checkpoints, rank=0, world=1)
    return trainer


def losses(
    case: Case, data: tuple[Path, Split], checkpoints: Path, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, checkpoints, points, dtype)
    if trainer.recipe.preference.needs_reference:
        use_reference(trainer, checkpoints / "reference.npy")
    trainer.fit()
    return [(point.loss, point.gradient_norm) for point in points]

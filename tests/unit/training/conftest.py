"""Tiny data, recipes and trainers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics
from pipelines.training.trainer import Trainer
from tests.settled import FP32

SHAPE = DecoderConfig(
    layers=2, width=32, heads=2, kv_heads=1, hidden=48, vocab_size=50, context_length=16
)
TRAIN = FP32 | {
    "steps": 10,
    "warmup_steps": 2,
    "micro_batch_size": 2,
    "global_batch_size": 6,
    "log_every": 1,
    "checkpoint_every": 4,
}


@dataclass
class Run:
    """A trainer of a fresh model, and what it reported."""

    trainer: Trainer
    model: Transformer
    points: list[StepMetrics] = field(default_factory=list)


class Noted(Events):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.entries: list[dict[str, Any]] = []

    def note(self, kind: Any, key: str, cause: str, done: str, **facts: Any) -> None:
        self.kinds.append(kind)
        self.entries.append({"key": key, "cause": cause, "done": done} | facts)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """A thousand tokens that repeat, so that there is something to learn."""
    writer = ShardWriter(tmp_path / "train-00000", vocab_size=50)
    writer.add((np.arange(1000) ** 2 % 50).astype(np.uint16))
    return Split(documents=1, bytes=1000, tokens=1000, shards=(writer.close(),))


@pytest.fixture
def start(tmp_path: Path, split: Split) -> Callable[..., Run]:
    """Build a run: `start("checkpoints", steps=4)`."""

    def build(
        folder: str = "checkpoints",
        parallel: dict[str, Any] | None = None,
        last_step: int | None = None,
        **train: object,
    ) -> Run:
        values = {"name": "t", "train": TRAIN | train, "parallel": parallel or {}}
        recipe = Recipe.model_validate(values)
        model = Transformer(SHAPE)
        model.init_weights(recipe.seed)
        loader = TokenLoader(
            TokenDataset(tmp_path, split, 16),
            seed=recipe.seed,
            global_batch=recipe.train.global_batch_size,
            micro_batch=recipe.train.micro_batch_size,
            dp_rank=0,
            dp_world=1,
            device=torch.device("cpu"),
        )
        points: list[StepMetrics] = []
        mesh = build_mesh(Layout(), torch.device("cpu"))
        trainer = Trainer(
            recipe,
            parallelize(model, mesh, recipe),
            loader,
            points.append,
            tmp_path / folder,
            tmp_path / "diagnostics",
            last_step=last_step,
        )
        return Run(trainer, model, points)

    return build

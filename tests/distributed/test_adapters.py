"""Adapters over several processes learn what they learn in one, on a base that stays as it is."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.peft_format import adapt, fill_adapters, save_adapter
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.models.weights import whole
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from pipelines.training.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.training import LENGTH, SHAPE, make_data
from tests.settled import FP32

CONFIG = DecoderConfig(**SHAPE)
FULL = {"sharding": "full"}
CASES = {
    "lora-ddp": ("lora", {}, {}),
    "lora-zero-3": ("lora", FULL, {}),
    "lora-zero-3-checkpointed": ("lora", FULL, {"activation_checkpoint": "full"}),
    "lora-tp": ("lora", {"tp": 2}, {}),
    "lora-tp-no-sp": ("lora", {"tp": 2, "sequence_parallel": False}, {}),
    "lora-tp-zero-3": ("lora", FULL | {"tp": 2, "dp_shard": 2}, {"activation_checkpoint": "full"}),
    "lora-tp-cp": ("lora", {"tp": 2, "cp": 2}, {}),
    "lora-cp": ("lora", {"cp": 2}, {}),
    "lora-cp-zero-3": ("lora", FULL | {"cp": 2}, {}),
    "qlora-cp": ("qlora", {"cp": 2}, {"activation_checkpoint": "selective"}),
    "qlora-ddp": ("qlora", {}, {}),
    "qlora-zero-1": ("qlora", {"sharding": "optimizer"}, {}),
    "qlora-zero-2": ("qlora", {"sharding": "gradients"}, {}),
    "qlora-zero-3": ("qlora", FULL, {}),
    "qlora-zero-3-checkpointed": ("qlora", FULL, {"activation_checkpoint": "selective"}),
    "qlora-zero-3-offload": ("qlora", FULL | {"cpu_offload": True}, {}),
}
FOUR = ("lora-tp-zero-3", "lora-tp-cp")
IN_MAKE_TEST = ("lora-zero-3", "qlora-zero-3")


class Outcome(NamedTuple):
    """Of one process."""

    losses: list[float]
    base_moved: bool
    trained: set[str]


def recipe(kind: str, base: Path, parallel: dict[str, Any], train: dict[str, Any]) -> Recipe:
    size = {"micro_batch_size": 1, "global_batch_size": 8}
    pace = {"steps": 4, "warmup_steps": 1, "lr": 1e-2, "log_every": 1, "checkpoint_every": 1000}
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"init_from": str(base)},
            "adapter": {"kind": kind, "rank": 3, "alpha": 6},
            "parallel": parallel,
            "train": {**FP32, **size, **pace, **train},
        }
    )


def fill(recipe: Recipe, part: Transformer) -> None:
    load_weights(part, Path(recipe.model.init_from or ""))
    fill_adapters(part, recipe)


def train(recipe: Recipe, data: tuple[Path, Split], folder: Path) -> Outcome:
    """What each process does."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), torch.device("cpu"))
    loader = TokenLoader(
        TokenDataset(*data, LENGTH),
        seed=recipe.seed,
        global_batch=recipe.train.global_batch_size,
        micro_batch=recipe.train.fixed_micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_world=mesh.dp_world,
        device=mesh.device,
        steps=recipe.train.steps,
    )
    with torch.device("meta"):
        model = Transformer(CONFIG)
        adapt(model, recipe)
    laid = parallelize(model, mesh, recipe, partial(fill, recipe))
    frozen = {n: whole(p).clone() for n, p in laid.named_parameters().items() if "lora" not in n}
    points: list[StepMetrics] = []
    checkpoints = folder / "checkpoints"
    trainer = Trainer(recipe, laid, loader, points.append, str(checkpoints), checkpoints)
    # Its window under the profiler takes longer than all of these steps.
    trainer.profiler = StepProfiler(None, checkpoints, rank=0, world=1)
    trainer.fit()
    now = laid.named_parameters()
    moved = any(not torch.equal(whole(now[name]), before) for name, before in frozen.items())
    save_pretrained(laid.modules, folder / "model")
    save_adapter(laid.modules[0], folder / "adapter")
    trained = {name for name, each in now.items() if each.grad is not None}
    return Outcome([point.loss for point in points], moved, trained)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    folder = tmp_path_factory.mktemp("data")
    return folder, make_data(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model = Transformer(CONFIG)
    model.init_weights(5)
    save_pretrained(model, folder)
    return folder


@pytest.fixture(scope="module")
def alone(
    base: Path, data: tuple[Path, Split], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Outcome, Path]]:
    """What one process does, and where it wrote it."""

    @cache
    def of(kind: str) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("alone")
        return train(recipe(kind, base, {}, {}), data, folder), folder

    return of


@pytest.mark.parametrize(
    ("world", "kind", "parallel", "only_here"),
    [
        pytest.param(
            4 if name in FOUR else 2,
            *case,
            id=name,
            marks=[] if name in IN_MAKE_TEST else pytest.mark.parity,
        )
        for name, case in CASES.items()
    ],
)
def test_several_processes_learn_what_one_does(
    world: int,
    kind: str,
    parallel: dict[str, Any],
    only_here: dict[str, Any],
    base: Path,
    data: tuple[Path, Split],
    alone: Callable[[str], tuple[Outcome, Path]],
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    expected, folder = alone(kind)
    found = pool(world).run(train, recipe(kind, base, parallel, only_here), data, tmp_path)
    for outcome in (expected, *found):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        assert not outcome.base_moved
        assert all(name.endswith(("lora_a.weight", "lora_b.weight")) for name in outcome.trained)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(folder / name), load_file(tmp_path / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key], tensor, atol=1e-5, rtol=1e-5)

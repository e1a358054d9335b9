"""Where some tokens are not to be predicted, each that is weighs the same, wherever it lies."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.loading.dataloader import IGNORED, TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.trainer import Trainer
from tests.forked import exit_codes, start_group
from tests.settled import FP32

SHAPE = DecoderConfig(
    layers=2, width=32, heads=2, kv_heads=1, hidden=48, vocab_size=50, context_length=16
)


def train_in_group(folder: Path) -> None:
    """One of two processes, which writes its losses."""
    dist.init_process_group("gloo")
    losses = train(folder, rank=dist.get_rank(), world=2)
    (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def write(folder: Path, mask: np.ndarray | None) -> Split:
    writer = ShardWriter(folder / "train-00000", vocab_size=50, masked=mask is not None)
    writer.add((np.arange(1000) ** 2 % 50).astype(np.uint16), mask=mask)
    return Split(documents=1, bytes=1000, tokens=1000, shards=(writer.close(),))


def uneven() -> np.ndarray:
    """A mask under which whole samples have nothing to predict, and others nearly all."""
    numbers = np.arange(1000)
    return ((numbers // 16 % 3 > 0) & (numbers % 16 < numbers // 16 % 16)).astype(np.uint8)


def loader(
    folder: Path, split: Split, rank: int = 0, world: int = 1, micro: int = 2
) -> TokenLoader:
    return TokenLoader(
        TokenDataset(folder, split, 16),
        seed=42,
        global_batch=6,
        micro_batch=micro,
        dp_rank=rank,
        dp_world=world,
        device=torch.device("cpu"),
    )


def train(folder: Path, rank: int = 0, world: int = 1, micro: int = 2) -> list[tuple[float, float]]:
    """The loss and gradient norm of six steps."""
    split = Split.model_validate_json((folder / "split.json").read_text())
    settings = FP32 | {"steps": 6, "warmup_steps": 2, "global_batch_size": 6, "log_every": 1}
    recipe = Recipe.model_validate({"name": "t", "train": settings | {"micro_batch_size": micro}})
    model = Transformer(SHAPE)
    model.init_weights(1)
    points: list[tuple[float, float]] = []
    Trainer(
        recipe,
        parallelize(model, build_mesh(Layout(dp_replicate=world), torch.device("cpu")), recipe),
        loader(folder, split, rank, world, micro),
        lambda point: points.append((point.loss, point.gradient_norm)),
        folder / f"checkpoints-{world}-{micro}",
        folder / "diagnostics",
    ).fit()
    return points


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    split = write(tmp_path, uneven())
    (tmp_path / "split.json").write_text(split.model_dump_json())
    return tmp_path


def test_the_loss_is_the_mean_over_what_is_predicted(masked: Path) -> None:
    split = Split.model_validate_json((masked / "split.json").read_text())
    ((batch, _),) = loader(masked, split, micro=6).micro_batches(0)
    assert 0 < int((batch.targets_BS == IGNORED).sum()) < batch.targets_BS.numel()
    model = Transformer(SHAPE)
    model.init_weights(1)
    nats_BS = (
        -model(batch.inputs_BS)
        .log_softmax(-1)
        .gather(2, batch.targets_BS.clamp(min=0).unsqueeze(2))
        .squeeze(2)
    )
    expected = nats_BS[batch.targets_BS != IGNORED].mean().item()
    assert train(masked)[0][0] == pytest.approx(expected, rel=1e-6)


def test_the_cut_into_micro_batches_changes_nothing_but_the_order_of_sums(masked: Path) -> None:
    whole = train(masked, micro=6)
    assert np.array(train(masked, micro=1)) == pytest.approx(np.array(whole), rel=1e-4)


def test_a_mask_of_ones_is_no_mask(tmp_path: Path) -> None:
    points = []
    for mask in (None, np.ones(1000, np.uint8)):
        folder = tmp_path / str(len(points))
        folder.mkdir()
        (folder / "split.json").write_text(write(folder, mask).model_dump_json())
        points.append(train(folder))
    assert points[0] == points[1]


def test_a_step_with_nothing_to_predict_learns_nothing(tmp_path: Path) -> None:
    split = write(tmp_path, np.zeros(1000, np.uint8))
    (tmp_path / "split.json").write_text(split.model_dump_json())
    assert train(tmp_path) == [(0.0, 0.0)] * 6


def test_two_processes_learn_what_one_does(masked: Path) -> None:
    """Though they predict unequal numbers of tokens."""
    assert exit_codes(start_group(train_in_group, (masked,), (masked,))) == [0, 0]
    alone = np.array(train(masked))
    for rank in range(2):
        together = np.array(json.loads((masked / f"losses-{rank}.json").read_text()))
        assert together == pytest.approx(alone, rel=1e-4)

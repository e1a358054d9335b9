"""What a trained model leaves behind, in every layout, is the loss of the folder that it writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines.models.check_batch import CheckBatch
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.run.records import Split
from pipelines.training.last_loss import last_loss
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import CASES
from tests.distributed.training import Case, build_trainer, make_data

QUICK = ("ddp", "zero-3", "tp-sp", "1f1b", "cp")
FILE = "check_batch.safetensors"


def train_and_leave(case: Case, data: tuple[Path, Split], folder: Path) -> None:
    """What each process does: train a little, measure, and write together."""
    trainer = build_trainer(case, data, folder / "checkpoints", [], torch.float32)
    trainer.schedule.last_step = 3
    trainer.fit()
    batch = last_loss(trainer)
    assert all(parameter.grad is None for parameter in trainer.parameters)
    save_pretrained(trainer.model.modules, folder / "model")
    if trainer.mesh.rank == 0:
        batch.save(folder / FILE)


@pytest.mark.parametrize("masked", [False, True], ids=["all targets", "some"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.parity])
        for case in CASES
        if "sliding_window" not in case.model or "family" in case.model  # Llama's know no window
    ],
)
def test_the_loss_left_behind_is_the_folders(
    case: Case, masked: bool, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    data = tmp_path, make_data(tmp_path, masked=masked)
    pool(case.world).run(train_and_leave, case, data, tmp_path)
    batch = CheckBatch.load(tmp_path / FILE)
    samples, length = batch.inputs_BS.shape
    assert 1 <= samples <= 8
    assert length == 16
    assert ((batch.targets_BS == -100).sum() > 0) == masked
    with torch.no_grad():
        model = load_pretrained(tmp_path / "model").eval()
        nats = model(batch.inputs_BS, targets_BS=batch.targets_BS).item()
    assert nats == pytest.approx(batch.nats, rel=1e-5)

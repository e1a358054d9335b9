"""What a trained model leaves behind, in every layout, is the loss of the folder that it writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines.models.check_batch import CheckBatch
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.run.records import Split
from pipelines.training.forward_backward import StepBatches
from pipelines.training.last_loss import last_loss
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import CASES
from tests.distributed.training import Case, build_loader, build_trainer, make_data

QUICK = ("ddp", "zero-3", "tp-sp", "1f1b", "cp")
EVERY, SOME = "every_target.safetensors", "some_targets.safetensors"
Data = tuple[Path, Split]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Data of which some tokens are no targets."""
    folder = tmp_path_factory.mktemp("masked")
    return folder, make_data(folder, masked=True)


def train_and_leave(case: Case, every: Data, some: Data, folder: Path) -> None:
    """What each process does: train a little, measure on all targets and on some, and write."""
    trainer = build_trainer(case, some, folder / "checkpoints", [], torch.float32)
    trainer.schedule.last_step = 3
    trainer.fit()
    for data, file in ((every, EVERY), (some, SOME)):
        loader = build_loader(case, trainer.recipe, data, trainer.mesh)
        trainer.batches = StepBatches(loader, trainer.mesh, trainer.batches.number)
        batch = last_loss(trainer)
        assert all(parameter.grad is None for parameter in trainer.parameters)
        if trainer.mesh.rank == 0:
            batch.save(folder / file)
    save_pretrained(trainer.model.modules, folder / "model")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.parity])
        for case in CASES
        if "sliding_window" not in case.model or "family" in case.model  # Llama's know no window
    ],
)
def test_the_loss_left_behind_is_the_folders(
    case: Case, data: Data, masked: Data, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(case.world).run(train_and_leave, case, data, masked, tmp_path)
    model = load_pretrained(tmp_path / "model").eval()
    for file in (EVERY, SOME):
        batch = CheckBatch.load(tmp_path / file)
        samples, length = batch.inputs_BS.shape
        assert 1 <= samples <= 8
        assert length == 16
        assert ((batch.targets_BS == -100).sum() > 0) == (file == SOME)
        with torch.no_grad():
            nats = model(batch.inputs_BS, targets_BS=batch.targets_BS).item()
        assert nats == pytest.approx(batch.nats, rel=1e-5)

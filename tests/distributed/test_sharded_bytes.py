"""Each process holds the share that its layout promises, by the storage that there really is."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pipelines.models.config import DecoderConfig
from pipelines.parallel.gradients import local
from pipelines.run.records import Split
from tests.distributed.pool import Pool
from tests.distributed.training import SHAPE, Case, build_trainer


class Bytes(NamedTuple):
    """Of one process."""

    parameters: int  # between steps
    gradients: int  # at the optimizer step
    state: int  # of the optimizer, then


_SHORT = {"micro_batch_size": 2, "steps": 2}
_UNTIED = {"tie_embeddings": False}  # a tied weight is in a pipeline's first and last stage
_ALL_OF_THEM = {"pp": 2, "tp": 2, "sharding": "full"}
# By what each is divided. ZeRO's stage 2 has whole parameters between steps, FSDP2's not.
CASES = [
    (Case("none", 2, {}), (1, 1, 1)),
    (Case("optimizer", 2, {"sharding": "optimizer"}), (1, 1, 2)),
    (Case("gradients", 2, {"sharding": "gradients"}), (2, 2, 2)),
    (Case("full", 2, {"sharding": "full"}), (2, 2, 2)),
    (Case("full-4", 4, {"sharding": "full"}), (4, 4, 4)),
    (Case("optimizer-4", 4, {"sharding": "optimizer"}), (1, 1, 4)),
    (Case("hsdp", 4, {"sharding": "full", "dp_replicate": 2, "dp_shard": 2}), (2, 2, 2)),
    (Case("cp", 2, {"cp": 2}, _SHORT), (1, 1, 1)),
    (Case("cp-optimizer", 2, {"cp": 2, "sharding": "optimizer"}, _SHORT), (1, 1, 2)),
    (Case("cp-full", 4, {"cp": 2, "sharding": "full"}, _SHORT), (4, 4, 4)),
    (Case("cp-tp-none", 4, {"cp": 2, "tp": 2}, _SHORT), (2, 2, 2)),
    (Case("tp", 2, {"tp": 2}, _SHORT), (2, 2, 2)),
    (Case("pp", 2, {"pp": 2}, _SHORT, model=_UNTIED), (2, 2, 2)),
    (Case("tp-full", 4, {"tp": 2, "sharding": "full"}, _SHORT), (4, 4, 4)),
    (Case("pp-tp", 4, {"pp": 2, "tp": 2}, _SHORT, model=_UNTIED), (4, 4, 4)),
    (Case("pp-tp-full", 8, _ALL_OF_THEM, _SHORT, model=_UNTIED), (8, 8, 8)),
]


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each counted once; a view's whole storage counts."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measure(case: Case, data: tuple[Path, Split], checkpoints: Path) -> Bytes:
    """Train for some steps and look."""
    trainer = build_trainer(case, data, checkpoints, [], torch.float32)
    parameters, optimizer = trainer.model.parameters(), trainer.optimizer
    gradients: list[int] = []

    def look(*_: object) -> None:
        updated = [each for group in optimizer.param_groups for each in group["params"]]
        found = [each.grad for each in (*parameters, *updated) if each.grad is not None]
        gradients.append(held(map(local, found)))

    optimizer.register_step_pre_hook(look)
    trainer.fit()
    state = [each for values in optimizer.state.values() for each in values.values() if each.ndim]
    return Bytes(held(map(local, parameters)), max(gradients), held(map(local, state)))


@pytest.mark.parametrize(
    ("case", "shares"),
    [
        pytest.param(case, shares, id=case.name, marks=[pytest.mark.parity] * (case.world > 2))
        for case, shares in CASES
    ],
)
def test_a_process_holds_its_share(
    case: Case,
    shares: tuple[int, int, int],
    data: tuple[Path, Split],
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    whole = DecoderConfig(**{**SHAPE, **case.model}).parameters * torch.float32.itemsize
    formula = Bytes(whole // shares[0], whole // shares[1], 2 * whole // shares[2])
    for found in pool(case.world).run(measure, case, data, tmp_path):
        assert found == pytest.approx(formula, rel=0.05)

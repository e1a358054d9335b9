"""Under every layout a model learns from pairs what it learns in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from pipelines.training.reference import use_reference
from pipelines.training.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import FULL, marked
from tests.distributed.training import Case, build_trainer, losses, make_pairs

DPO, IPO = {"kind": "dpo", "beta": 0.5}, {"kind": "ipo", "beta": 0.5}
KTO = {"kind": "kto", "beta": 0.5}
ORPO, SIMPO = {"kind": "orpo", "beta": 0.5}, {"kind": "simpo", "beta": 2.0}
_HALVES, _PAIRS = {"micro_batch_size": 4}, {"micro_batch_size": 2}


def case(name: str, world: int, parallel: dict, kind: dict, train: dict, **more: bool) -> Case:
    return Case(name, world, parallel, train, documents=True, preference=kind, **more)


CASES = [
    case("ddp", 2, {}, DPO, _PAIRS),
    case("zero-1", 2, {"sharding": "optimizer"}, SIMPO, {}, slow=True),
    case("zero-3", 2, FULL, ORPO, _PAIRS),
    case("tp", 2, {"tp": 2}, DPO, _HALVES),
    case("cp", 2, {"cp": 2}, DPO, _HALVES),
    case("cp-orpo", 2, {"cp": 2}, ORPO, _HALVES, slow=True),
    case("1f1b", 2, {"pp": 2}, DPO, _PAIRS),
    case("gpipe", 2, {"pp": 2, "schedule": "gpipe"}, IPO, _PAIRS, slow=True),
    case("interleaved", 2, {"pp": 2, "schedule": "interleaved_1f1b"}, DPO, _PAIRS, slow=True),
    case("zero-bubble", 2, {"pp": 2, "schedule": "zero_bubble"}, DPO, _PAIRS, slow=True),
    case("ddp-uneven", 4, {}, DPO, {"global_batch_size": 6}),
    case("kto-ddp", 2, {}, KTO, _PAIRS),
    case("kto-cp-pp", 4, {"cp": 2, "pp": 2}, KTO, _PAIRS),
    case("kto-tp-fsdp", 4, FULL | {"tp": 2}, KTO, _HALVES, slow=True),
    case("hsdp", 4, FULL | {"dp_replicate": 2, "dp_shard": 2}, DPO, {}),
    case("tp-fsdp", 4, FULL | {"tp": 2}, IPO, _HALVES),
    case("cp-tp", 4, {"cp": 2, "tp": 2}, SIMPO, _HALVES),
    case("cp-pp", 4, {"cp": 2, "pp": 2}, DPO, _PAIRS),
    case("cp-pp-tp", 8, {"cp": 2, "pp": 2, "tp": 2}, DPO, _PAIRS),
    case("pp-tp-fsdp", 8, FULL | {"pp": 2, "tp": 2}, ORPO, _PAIRS),
]

SINGLE = [
    case("kto-ddp", 2, {}, KTO | {"weight_of_rejected": 2.0}, _PAIRS),
    case("kto-cp-pp", 4, {"cp": 2, "pp": 2}, KTO, _PAIRS),
    case("kto-tp-fsdp", 4, FULL | {"tp": 2}, KTO, _HALVES, slow=True),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    folder = tmp_path_factory.mktemp("pairs")
    return folder, make_pairs(folder)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    folder = tmp_path_factory.mktemp("labelled")
    return folder, make_pairs(folder, labelled=True)


@pytest.fixture(scope="module")
def alone(pairs: tuple[Path, Split], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """What one process does in a case."""

    @cache
    def of(preference: tuple, train: tuple) -> list[tuple[float, float]]:
        by_itself = case("alone", 1, {}, dict(preference), dict(train))
        return losses(by_itself, pairs, tmp_path_factory.mktemp("alone"), torch.float64)

    return lambda case: of(tuple(case.preference.items()), tuple(case.train.items()))


@pytest.mark.long
@pytest.mark.parametrize("case", marked(CASES))
def test_pairs_teach_what_they_teach_one_process(
    case: Case,
    pairs: tuple[Path, Split],
    alone: Callable,
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    expected = alone(case)
    for found in pool(case.world).run(losses, case, pairs, tmp_path, torch.float64):
        assert found == [pytest.approx(point, rel=1e-10) for point in expected]
    assert expected[-1][0] < expected[0][0] * 0.9  # there was something to learn


@pytest.mark.parametrize("case", marked(SINGLE))
def test_labelled_answers_teach_what_they_teach_one_process(
    case: Case, labelled: tuple[Path, Split], pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    one = replace(case, world=1, parallel={})
    expected = losses(one, labelled, tmp_path / "alone", torch.float64)
    for found in pool(case.world).run(losses, case, labelled, tmp_path, torch.float64):
        assert found == [pytest.approx(point, rel=1e-10) for point in expected]
    assert expected[-1][0] < expected[0][0] * 0.9  # there was something to learn


@pytest.mark.parametrize("kind", [DPO, KTO], ids=["dpo", "kto"])
def test_a_run_that_ended_early_goes_on_to_the_same_bits(
    kind: dict, pairs: tuple[Path, Split], tmp_path: Path
) -> None:
    saved = case("saved", 1, {}, kind, {**_HALVES, "checkpoint_every": 5})

    def trained(folder: Path, points: list[StepMetrics], ends: int | None = None) -> Trainer:
        trainer = build_trainer(saved, pairs, folder, points, torch.float32)
        use_reference(trainer, folder / "reference.npy")

        def report(point: StepMetrics) -> None:
            points.append(point)
            if point.step == ends:
                raise InterruptedError

        trainer.report = report
        trainer.fit()
        return trainer

    whole, parts = [], []
    expected = trained(tmp_path / "whole", whole)
    with pytest.raises(InterruptedError):
        trained(tmp_path / "parts", parts, ends=8)
    measured = (tmp_path / "parts" / "reference.npy").stat().st_ino
    found = trained(tmp_path / "parts", parts)
    assert (tmp_path / "parts" / "reference.npy").stat().st_ino == measured
    assert [point.loss for point in parts[8:]] == [point.loss for point in whole[5:]]
    assert whole[-1].further["reward_margin"] > 0
    for ours, theirs in zip(found.parameters, expected.parameters, strict=True):
        assert torch.equal(ours, theirs)

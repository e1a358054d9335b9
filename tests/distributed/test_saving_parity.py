"""Accumulation, checkpointing and compile change no loss, in pairs, whatever the layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pipelines.run.records import Split
from tests.compiling import needs_a_linker
from tests.distributed.pool import Pool
from tests.distributed.training import Case, losses, small

LAYOUTS = {"zero-3": {"sharding": "full"}, "tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}}
ACCUMULATION = {"micro_batch_size": 1}
SELECTIVE = {"activation_checkpoint": "selective"}
FULL = {"activation_checkpoint": "full"}
COMPILE = {"compile": True}
TRAIN = {"micro_batch_size": 4, "steps": 8}
PAIRS = {
    "accumulation-selective": ACCUMULATION | SELECTIVE,
    "accumulation-compile": ACCUMULATION | COMPILE,
    "selective-compile": SELECTIVE | COMPILE,
    "full-compile": FULL | COMPILE,
}
CASES = [
    pytest.param(
        small(Case(f"{layout}-{pair}", 2, parallel, TRAIN, savings)),
        id=f"{layout}-{pair}",
        # To compile takes half a minute: only checkpointing is tested each time.
        marks=[] if pair == "accumulation-selective" else [pytest.mark.parity, needs_a_linker],
    )
    for layout, parallel in LAYOUTS.items()
    for pair, savings in PAIRS.items()
]


@pytest.fixture(scope="module")
def plain(
    data: tuple[Path, Split], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], list[tuple[float, float]]]:
    """What one process does without any of them."""

    @cache
    def of(model: tuple) -> list[tuple[float, float]]:
        case = Case("plain", 1, {}, TRAIN, model=dict(model))
        return losses(case, data, tmp_path_factory.mktemp("plain"), torch.float32)

    return lambda case: of(tuple(case.model.items()))


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_one_plain_process(
    case: Case,
    plain: Callable[[Case], list[tuple[float, float]]],
    data: tuple[Path, Split],
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    expected = plain(case)
    for found in pool(case.world).run(losses, case, data, tmp_path, torch.float32):
        assert found == [pytest.approx(point, rel=1e-5) for point in expected]

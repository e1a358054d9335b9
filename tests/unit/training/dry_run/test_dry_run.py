"""The real step on GPUs that don't exist: it runs, waits nowhere, and is what the planner says."""

from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.planning.hardware_table import named
from pipelines.planning.layout_rule import Choice
from pipelines.recipe.recipe_files import override_values, shipped_recipes
from pipelines.training.dry_run.dry_run import Case, Report, dry_run
from pipelines.training.dry_run.wait_log import WAITS
from tests.unit.training.dry_run.dry_run_cases import (
    FURTHER,
    ONE,
    QUICK,
    REPLICAS,
    Tried,
    predicted,
    sent,
    shipped,
)
from tests.unit.training.dry_run.forked_rank import forked_rank

DATA = ("dp_replicate", "dp_shard", "all", "dp_shard_cp", "dp_replicate_dp_shard")
BYTES = 0.08
PLANTED = "tests.unit.training.dry_run.planted_fault"


def check_waits(report: Report) -> None:
    """The host waits where it is known to be right, and nowhere else."""
    assert {(wait["file"], wait["function"]) for each in report.ranks for wait in each.waits} <= (
        WAITS.keys()
    )


def check_exchanges(report: Report, case: Case, choice: Choice) -> None:
    """Each kind of parallelism sends what the planner says, but for a step's few scalars."""
    expected = predicted(case, choice)
    data = expected.weights + expected.gradients + expected.replicas + expected.optimizer
    scalars = 1e3
    assert sent(report, *DATA) == pytest.approx(data, rel=BYTES, abs=scalars)
    assert sent(report, "tp") == pytest.approx(expected.tensor, rel=BYTES, abs=scalars)
    assert sent(report, "cp") == pytest.approx(expected.context, rel=BYTES, abs=scalars)


def check(tried: Tried) -> None:
    case, choice = tried.laid()
    report = dry_run(case)
    check_waits(report)
    check_exchanges(report, case, choice)
    assert {rank.graphs for rank in report.ranks} == {tried.graphs}
    assert choice.memory.used == pytest.approx(report.fullest.peak_bytes, rel=BYTES)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the many that only the proof runs; others start the real command for each rank."""
    monkeypatch.setattr("pipelines.training.dry_run.dry_run._rank", forked_rank)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_layout(name: str) -> None:
    check(QUICK[name])


@pytest.mark.parity
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", FURTHER)
def test_another_layout(name: str) -> None:
    check(FURTHER[name])


@pytest.mark.parity
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("masked", [True, False])
def test_a_window_by_varlen(masked: bool) -> None:
    case, choice = QUICK["documents, varlen, compiled"].laid()
    recipe = override_values(case.recipe, {"data.document_mask": masked})
    shape = replace(case.shape, sliding_window=512)
    report = dry_run(replace(case, recipe=recipe, shape=shape))
    check_waits(report)
    assert report.ranks[0].graphs == 1
    assert choice.memory.used == pytest.approx(report.fullest.peak_bytes, rel=BYTES)


@pytest.mark.parity
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe(name: str) -> None:
    case, choice = shipped(name)
    if case.recipe.parallel.ep > 1:
        with pytest.raises(UserError, match=r"dry-run: not with parallel\.ep\(8\)"):
            dry_run(case)
        return
    report = dry_run(case)
    check_waits(report)
    check_exchanges(report, case, choice)
    assert choice.memory.used == pytest.approx(report.fullest.peak_bytes, rel=BYTES)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("number", "a number is read"), ("host", "a stream or an event is waited for")],
)
def test_a_wait_is_found_with_its_place(fault: str, kind: str, monkeypatch) -> None:
    monkeypatch.setenv("DRY_RUN_FAULT", fault)
    case, _ = ONE.laid()
    (found,) = (wait for wait in dry_run(case, PLANTED).ranks[0].waits if not wait["reason"])
    assert (found["kind"], found["count"]) == (kind, 1)
    assert found["file"] in ("training/trainer.py", "parallel/gradients.py")
    assert found["line"] > 0


def test_a_missing_exchange_is_not_what_the_planner_says(monkeypatch) -> None:
    monkeypatch.setenv("DRY_RUN_FAULT", "exchange")
    case, choice = REPLICAS.laid()
    with pytest.raises(AssertionError):
        check_exchanges(dry_run(case, PLANTED), case, choice)


def test_a_mistake_is_told_in_one_line() -> None:
    case, _ = ONE.laid()
    recipe = override_values(case.recipe, {"train.precision": "fp8", "train.compile": True})
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU of compute capability 8\.9"):
        dry_run(replace(case, recipe=recipe, hardware=named("a100-80")))


def test_varlen_is_refused_where_flash_attention_does_not_run() -> None:
    case, _ = QUICK["documents, varlen, compiled"].laid()
    with pytest.raises(UserError, match=r"attention = varlen: .* capability 8\.0 or later"):
        dry_run(replace(case, hardware=named("t4")))


def test_a_device_without_cuda_is_refused() -> None:
    case, _ = ONE.laid()
    with pytest.raises(UserError, match="is no NVIDIA GPU"):
        dry_run(replace(case, hardware=named("tpu-v4")))


def test_its_memory_on_the_host_is_limited(monkeypatch) -> None:
    monkeypatch.setenv("DRY_RUN_FAULT", "memory")
    case, _ = ONE.laid()
    with pytest.raises(RuntimeError, match="MemoryError"):
        dry_run(case, PLANTED)


def test_a_case_survives_its_text() -> None:
    case, _ = QUICK["tensor"].laid()
    assert Case.from_json(case.to_json()) == case

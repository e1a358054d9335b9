"""What the planner says of runs that it was not fitted to, and how far off that is."""

from pathlib import Path

import pytest

from pipelines.planning.communication import communication
from pipelines.planning.hardware_table import named
from pipelines.planning.step_time import bubble, step_time
from tests.unit.planning.blind_runs import (
    RESULTS,
    RUNS,
    model,
    predicted,
    published,
    step_tokens,
    summary,
    table,
    training,
)

ROWS = {row["run"]: row for row in table(RESULTS)}
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "training.md"
REWRITE = "if that was meant: .venv/bin/python -m tests.unit.planning.blind_runs"


def test_each_run_has_a_prediction_and_a_figure() -> None:
    assert ROWS.keys() == RUNS.keys()
    for run in RUNS.values():
        assert training(run).layout.world == int(run["gpus"]), run["run"]


@pytest.mark.parametrize("name", RUNS)
def test_the_table_says_what_the_planner_says(name: str) -> None:
    assert predicted(RUNS[name]) == pytest.approx(float(ROWS[name]["today"]), rel=0.01), REWRITE


def test_the_documentation_says_how_far_off_the_planner_is() -> None:
    text = DOCUMENTATION.read_text(encoding="utf-8")
    assert [line for line in summary() if line not in text] == [], REWRITE


def test_published_figures_become_tokens() -> None:
    """Two papers state a run in two ways each."""
    # Narayanan et al. 2021, section 5.1: 450 billion tokens take 84 days.
    trillion = 3072 * published(ROWS["megatron 1t 3072"])
    assert 450e9 / trillion / 86_400 == pytest.approx(84, rel=0.02)
    # Smith et al. 2022, section 2.4: 44.4 seconds are 113 TFLOP/s.
    seconds = ROWS["mt-nlg 530b 3360"]
    rate = seconds | {"published": "113", "unit": "TFLOP/s"}
    assert published(rate) == pytest.approx(published(seconds), rel=0.02)
    assert step_tokens(RUNS["mt-nlg 530b 3360"]) == 1920 * 2048


def test_stages_explain_llama_3() -> None:
    """With eight stages a process instead of two, which the documentation claims."""
    for name in ("llama3 405b 8192", "llama3 405b 16384"):
        run = RUNS[name]
        pp, number = int(run["pp"]), int(run["accumulation"])
        busy = 1 - bubble("interleaved_1f1b", pp, number)
        eight = 8 * number / (8 * number + pp - 1)
        assert predicted(run) / busy * eight == pytest.approx(published(ROWS[name]), rel=0.02)


def test_tensor_parallel_sums_of_nvidia_s_runs() -> None:
    """The documentation says which part of a step they take."""
    parts = []
    for name, run in RUNS.items():
        if name.startswith(("nemo", "bridge")) and int(run["tp"]) > 1:
            hardware = named(run["gpu"])
            step = step_time(model(run), training(run), hardware)
            parts.append(
                communication(model(run), training(run), hardware, 1.0).tensor / step.total
            )
    assert min(parts) == pytest.approx(0.05, abs=0.005)
    assert max(parts) == pytest.approx(0.13, abs=0.005)

from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.planning.hardware_table import named
from pipelines.planning.plan import Machine
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe, parse_recipe
from pipelines.stages.plan_check import (
    beside_measured,
    bound_beside_reported,
    keep_plan,
    read_plan,
    stage_beside_measured,
)
from pipelines.stages.run_plan import plan_run

EIGHT = Machine(named("h100"), 8, price=2.0)


def llama(model: str = "llama3-8b", workers: Any = 8, **parallel: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "t",
        "data": {
            "sequence_length": 8192,
            "tokenizer": {"kind": "pretrained", "path": "tokenizer.json"},
        },
        "model": {"preset": model},
        "train": {"micro_batch_size": 1, "global_batch_size": 64, "precision": "bf16"},
        "parallel": parallel,
        "resources": {"workers": workers},
    }
    return parse_recipe(values)


def test_a_run_that_fits_has_a_plan() -> None:
    values = plan_run(llama(sharding="full", tp=2), EIGHT)
    assert values["fits"]
    assert values["asked"]["memory_gib"]["total"] < 80
    assert len(values["layouts"]) == 3


def test_one_that_does_not_is_told_three_layouts_that_would() -> None:
    with pytest.raises(UserError) as error:
        plan_run(llama(), EIGHT)
    message = str(error.value)
    assert "\n" not in message
    assert "dp_replicate 8, sharding none: needs" in message
    named_layouts = message.partition("these layouts fit: ")[2].split("; ")
    assert len(named_layouts) == 3
    assert all("micro_batch_size" in each for each in named_layouts)


def test_where_none_would_the_least_is_told() -> None:
    with pytest.raises(UserError, match=r"no layout for this number of devices fits; .* larger"):
        plan_run(llama("llama3-70b"), EIGHT)


def test_another_number_of_elastic_workers_may_have_the_layout() -> None:
    with pytest.raises(UserError, match="= 16 processes, but there are 8"):
        plan_run(llama(dp_shard=8, tp=2, sharding="full"), EIGHT)
    elastic = llama(workers=[8, 16], dp_shard=8, tp=2, sharding="full")
    assert not plan_run(elastic, EIGHT)["fits"]


@pytest.mark.parametrize("name", ["stdlib-code", "debug", "shakespeare-char"])
def test_small_recipes_fit_a_small_machine(name: str) -> None:
    assert plan_run(load_recipe(name), Machine(named("cpu"), 2))["fits"]


def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    values = plan_run(llama(sharding="full", tp=2), EIGHT)
    keep_plan(tmp_path, values)
    speed, memory = values["tokens_per_second"], values["asked"]["memory_gib"]
    used = memory["total"] - memory["margin"]
    speeds = [speed * factor for factor in (0.1, 2.0, 2.0)]
    found = beside_measured(tmp_path, speeds, int(used / 1.1 * 2**30))
    assert found["plan/tokens_per_second_predicted"] == speed
    assert found["plan/tokens_per_second_error"] == pytest.approx(-0.5)
    assert found["plan/memory_gib_error"] == pytest.approx(0.1)
    cost = values["stages"]["train"]["cost"]
    assert cost == pytest.approx(16 * values["hours"])
    seconds = values["hours"] * 3600
    trained = stage_beside_measured(tmp_path, "train", seconds / 2, cost / 2)
    assert trained["plan/cost_error"] == trained["plan/train_seconds_error"] == pytest.approx(1)
    assert stage_beside_measured(tmp_path, "validate", 10.0, 1.0) == {}
    bound = values["bound_by"]
    told, is_hit = bound_beside_reported(tmp_path, bound) or ("", False)
    assert is_hit
    assert told.startswith(f"{bound} for ")
    assert bound_beside_reported(tmp_path, "storage") == (told, False)
    assert bound_beside_reported(tmp_path, "host") == (told, True)  # no roof was reached by half


def test_cleaning_text_is_forecast_by_what_the_source_holds(tmp_path: Path) -> None:
    """1.25 MB/s a core, on as many as the recipe has workers."""
    inputs = [{"path": "a", "bytes": 10_000_000}, {"path": "b", "bytes": 15_000_000}]
    values = plan_run(llama(sharding="full", tp=2), EIGHT, {"source": {"inputs": inputs}})
    keep_plan(tmp_path, values)
    found = stage_beside_measured(tmp_path, "preprocess", 5.0, None)
    assert found["plan/preprocess_seconds_predicted"] == pytest.approx(2.5)
    assert found["plan/preprocess_seconds_error"] == pytest.approx(-0.5)
    known = values["stages"]["evaluate"]
    assert values["cost"] == pytest.approx(values["stages"]["train"]["cost"] + known["cost"])


def test_a_stage_without_a_forecast_says_why() -> None:
    stages = plan_run(llama(sharding="full", tp=2), EIGHT)["stages"]
    assert {name for name, each in stages.items() if each["hours"] is None} == {
        "preprocess",
        "validate",
        "register",
    }
    assert all(
        (each["why_unknown"] is None) == (each["hours"] is not None) for each in stages.values()
    )
    assert all(each["bound_by"] for each in stages.values())


def test_without_a_forecast_nothing_is_compared(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    assert beside_measured(tmp_path, [1.0], 1) == {}
    assert stage_beside_measured(tmp_path, "train", 1.0, 1.0) == {}
    assert bound_beside_reported(tmp_path, "compute") is None
    elastic = llama(workers=[8, 16], dp_shard=8, tp=2, sharding="full")
    keep_plan(tmp_path, plan_run(elastic, EIGHT))
    assert read_plan(tmp_path) is None

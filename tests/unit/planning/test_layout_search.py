import re
from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.models.presets import PRESETS, preset
from pipelines.planning.cost import usual_values
from pipelines.planning.hardware_table import ENTRIES, named
from pipelines.planning.layout_rule import AS_FAST, choose
from pipelines.planning.layout_search import largest_model, nearest, own, search, smallest_machine
from pipelines.planning.plan import Machine, plan, plan_json
from pipelines.planning.step_time import step_time
from pipelines.planning.storage_needs import Storage
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe, override_values, parse_recipe


def usual(model: str, gpu: str, gpus: int, adapter: str = "none") -> Recipe:
    return parse_recipe(usual_values(model, preset(model), named(gpu), gpus, adapter))


def searched(model: str, gpu: str, gpus: int, adapter: str = "none"):
    return search(usual(model, gpu, gpus, adapter), preset(model), named(gpu), gpus)


def test_those_that_fit_come_first_by_time_and_all_others_say_why_not() -> None:
    found = searched("llama3-8b", "h100", 8)
    fits = [each.fits for each in found]
    assert fits == sorted(fits, reverse=True)
    seconds = [each.step.total for each in found if each.fits and each.step]
    assert len(seconds) > 10
    assert seconds == sorted(seconds)
    assert all(each.why_not for each in found if not each.fits)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        if each.fits and each.choice:
            assert each.choice.layout.world == 8
            assert each.choice.memory.total <= named("h100").memory_bytes


def test_a_choice_is_a_recipe_that_can_run() -> None:
    best = searched("llama3-70b", "h100", 64)[0]
    assert best.choice is not None
    recipe = best.choice.recipe
    assert not recipe.parallel.by_rule
    assert recipe.train.activation_checkpoint == best.choice.training.activation_checkpoint
    again = own(recipe, preset("llama3-70b"), named("h100"), 64)
    assert [each.step for each in again] == [best.step]


def test_70b_is_not_for_one_small_card() -> None:
    found = searched("llama3-70b", "rtx4090", 1)
    assert not any(each.fits for each in found)
    near = nearest(found)
    assert [each.choice is not None for each in near] == [True] * 3
    assert near[0].why_not is not None
    assert re.search(r"^needs \S+ GiB of 24.0, most for optimizer", near[0].why_not)


def test_what_divides_nothing_says_so() -> None:
    found = searched("gpt2-124m", "h100", 8)
    refused = [each for each in found if each.choice is None]
    assert any("does not divide the model's kv_heads(12)" in str(each.why_not) for each in refused)


def test_what_overlaps_over_nodes_says_so() -> None:
    wide = {"parallel.async_tp": True, "parallel.tp": 4, "parallel.pp": 1, "train.compile": True}
    recipe = override_values(usual("llama3-8b", "h100", 8), wide)
    (refused,) = own(recipe, preset("llama3-8b"), replace(named("h100"), devices_per_node=2), 8)
    assert refused.why_not == "parallel.async_tp: parallel.tp(4) is more than the 2 of a node"
    overlapped, apart = (
        own(each, preset("llama3-8b"), named("h100"), 8)[0]
        for each in (recipe, override_values(recipe, {"parallel.async_tp": False}))
    )
    assert overlapped.step is not None
    assert apart.step is not None
    assert overlapped.step.network < apart.step.network
    assert overlapped.step.products == apart.step.products


def test_long_samples_are_divided_too() -> None:
    values = usual_values("llama3-8b", preset("llama3-8b"), named("h100"), 8, "none")
    values["data"]["sequence_length"] = 131_072
    found = search(parse_recipe(values), preset("llama3-8b"), named("h100"), 8)
    assert any(each.fits and each.choice and each.choice.layout.cp > 1 for each in found)


def test_the_smallest_machine_and_the_largest_model() -> None:
    cards = {name: ENTRIES[name] for name in ("rtx4090", "h100")}
    recipe = usual("llama3-8b", "rtx4090", 1, "qlora")
    assert smallest_machine(recipe, preset("llama3-8b"), cards) == [("rtx4090", 1), ("h100", 1)]
    published = {name: each for name, each in PRESETS.items() if each.vocab_size}
    largest = largest_model(recipe, published, named("rtx4090"), 1)
    sizes = [PRESETS[largest[kind]].parameters for kind in ("none", "lora", "qlora")]
    assert sizes == sorted(sizes)
    assert largest["qlora"] == "gpt-neox-20b"


@pytest.mark.parametrize(
    ("model", "gpus"), [("gpt2-124m", 8), ("llama3-8b", 8), ("llama3-70b", 64)]
)
def test_auto_takes_the_simplest_of_the_fastest(model: str, gpus: int) -> None:
    recipe, config, h100 = usual(model, "h100", gpus), preset(model), named("h100")
    taken = choose(recipe, config, gpus, h100.memory_bytes, hardware=h100)
    ranked = own(recipe, config, h100, gpus)
    assert ranked[0].choice == taken
    fastest = min(each.step.total for each in ranked if each.fits and each.step)
    assert step_time(config, taken.training, h100).total <= AS_FAST * fastest


def test_auto_without_a_datasheet_is_the_rule() -> None:
    recipe, config = usual("llama3-8b", "h100", 8), preset("llama3-8b")
    taken = choose(recipe, config, 8, 144 * 2**30)
    assert (taken.layout.dp_shard, taken.training.sharding) == (8, "gradients")


def test_a_plan_is_one_json_object() -> None:
    config = preset("llama3-8b")
    machine = Machine(named("h100"), 16, Storage(10e9, 10e9), price=2.0)
    found = plan(usual("llama3-8b", "h100", 16), config, machine, any_layout=True)
    values = plan_json(found)
    assert values["fits"]
    assert values["layouts"][0]["memory_gib"]["total"] <= 79.7
    assert values["step_seconds"] == values["layouts"][0]["step_seconds"]
    # 20 tokens a parameter, and attention on top of 6 N D.
    assert values["flops"] > 6 * config.parameters * 20 * config.parameters
    assert values["cost"] == pytest.approx(32 * values["hours"], rel=1e-3)
    assert values["stages"]["train"]["price_per_hour"] == 32
    assert values["stages"]["preprocess"]["hours"] is None
    assert [each["holds"] for each in values["demands"]] == [True] * 3
    assert values["demands"][0]["given"] == 5e9
    assert values["mfu"] == pytest.approx(0.5, abs=0.08)  # nanochat's d24 on 8 H100, compiled


@pytest.mark.parametrize(
    ("preference", "text_bytes", "share"),
    [
        ("simpo", None, 0),
        ("dpo", None, 1 / 3),
        ("kto", 4 * 500 * 16 * 4096 // 2, 1 / 6),  # half as many pairs as training reads
    ],
)
def test_the_pass_that_measures_the_reference_takes_time(
    preference: str, text_bytes: int | None, share: float
) -> None:
    recipe = load_recipe("llama3-8b-dpo", [f"preference.kind={preference}"])
    machine = Machine(named("h100"), 1)
    found = plan(recipe, preset("llama3-8b"), machine, any_layout=True, text_bytes=text_bytes)
    assert found.forecast is not None
    steps = 500 * found.forecast.step_seconds / 3600
    assert found.forecast.hours == pytest.approx(steps * (1 + share), rel=0.02)  # and saving


def test_a_storage_that_is_too_slow_binds_training() -> None:
    config = preset("gpt2-124m")
    recipe = usual("gpt2-124m", "h100", 64)
    slow = plan(recipe, config, Machine(named("h100"), 64, Storage(1e6, 1e6)), any_layout=True)
    quick = plan(recipe, config, Machine(named("h100"), 64, Storage(1e11, 1e11)), any_layout=True)
    assert slow.forecast is not None
    assert quick.forecast is not None
    assert (slow.forecast.bound_by, slow.forecast.bound_share) == ("storage", 1.0)
    assert quick.forecast.bound_by != "storage"
    assert slow.forecast.step_seconds == pytest.approx(2 * 2**19 / 1e6, rel=0.01)


def test_an_mfu_beyond_the_memory_is_refused() -> None:
    h100 = replace(named("h100"), mfu=0.95, memory_bandwidth=1e11)
    with pytest.raises(UserError, match=r"an MFU of 0\.95 is more than attention and its memory"):
        search(usual("gpt2-124m", "h100", 1), preset("gpt2-124m"), h100, 1)

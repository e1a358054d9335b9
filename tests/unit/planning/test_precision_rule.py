"""What `precision: auto` and `compile: auto` become, by device and beside what is refused."""

from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.models.presets import preset
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout
from pipelines.planning.hardware_table import entries, named
from pipelines.planning.layout_search import search
from pipelines.planning.plan import Machine, plan, plan_json
from pipelines.planning.precision_rule import Device, is_settled, reasons, settle_precision
from pipelines.recipe.recipe import Recipe

COMPILED, EAGER = ("bf16", True), ("fp32", False)


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "t", **sections})


def settled(gpu: str, asked: Recipe) -> tuple[str, bool]:
    train = settle_precision(asked, Device.of(named(gpu))).train
    return train.fixed_precision, train.fixed_compile


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("cpu", EAGER),
        ("h100", COMPILED),
        ("a100-80", COMPILED),
        ("l4", COMPILED),
        ("rtx4090", COMPILED),
        ("mi300x", COMPILED),
        ("v100-32", EAGER),
        ("t4", EAGER),
    ],
)
def test_auto_follows_the_device(gpu: str, expected: tuple[str, bool]) -> None:
    assert settled(gpu, recipe()) == expected


def test_what_nvidia_calls_old_has_no_bf16() -> None:
    capable = {n: e.capability for n, e in entries().items() if e.capability is not None}
    assert {name: Device.of(named(name)).has_bf16 for name in capable} == {
        name: capability >= (8, 0) for name, capability in capable.items()
    }


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"precision": "fp32"}}, ("fp32", True)),
        ({"train": {"compile": False}}, ("bf16", False)),
        ({"train": {"precision": "tf32", "compile": False}}, ("tf32", False)),
        ({"train": {"precision": "fp8"}}, ("fp8", True)),
        ({"parallel": {"schedule": "zero_bubble", "pp": 2}}, ("bf16", False)),
        ({"parallel": {"schedule": "zero_bubble", "pp": "auto"}}, ("bf16", False)),
        (
            {"parallel": {"schedule": "zero_bubble"}},
            COMPILED,
        ),  # with one stage
        ({"parallel": {"schedule": "1f1b", "pp": 2}}, COMPILED),
        ({"parallel": {"sharding": "full", "cpu_offload": True}}, COMPILED),
        ({"train": {"activation_checkpoint": "full"}}, COMPILED),
        ({"model": {"init_from": "base"}, "adapter": {"kind": "qlora"}}, COMPILED),
    ],
)
def test_what_a_recipe_sets_stays_and_what_can_t_be_compiled_is_not(
    sections: dict[str, object], expected: tuple[str, bool]
) -> None:
    assert settled("h100", recipe(**sections)) == expected


def test_nothing_else_of_a_recipe_changes_and_a_settled_one_is_itself() -> None:
    asked = recipe()
    on_cpu = settle_precision(asked, Device.of(named("cpu")))
    values = on_cpu.to_dict()
    values["train"] |= {"precision": "auto", "compile": "auto"}
    assert values == asked.to_dict()
    assert is_settled(on_cpu)
    assert settle_precision(on_cpu, Device.of(named("h100"))) is on_cpu


def test_fp8_in_a_zero_bubble_pipeline_is_refused_as_it_must_be_compiled() -> None:
    parallel = {"schedule": "zero_bubble", "pp": 2}
    asked = recipe(parallel=parallel, train={"precision": "fp8"})
    fp8 = settle_precision(asked, Device.of(named("h100")))
    with pytest.raises(UserError, match=r"train\.compile: not with parallel\.schedule = zero_bubb"):
        check_division(preset("llama-1m"), Layout(pp=2), fp8)


def test_each_auto_has_a_line() -> None:
    h100 = Device.of(named("h100"))
    assert reasons(recipe(), h100) == [
        "train.precision: auto is bf16 on a GPU with bf16",
        "train.compile: auto is true on a GPU with bf16",
    ]
    (why,) = reasons(
        recipe(parallel={"schedule": "zero_bubble", "pp": 2}, train={"precision": "bf16"}), h100
    )
    assert why == (
        "train.compile: auto is false with parallel.schedule = zero_bubble, which can't be compiled"
    )
    assert reasons(settle_precision(recipe(), h100), h100) == []


def test_a_recipe_that_is_not_settled_can_t_be_taken_for_a_value() -> None:
    with pytest.raises(ValueError, match="precision: auto is resolved"):
        _ = recipe().train.fixed_precision
    with pytest.raises(ValueError, match="compile: auto is resolved"):
        _ = recipe().train.fixed_compile


def test_a_plan_is_of_the_machine_s_own_values() -> None:
    shape = preset("llama-1m").sized(1000, 512)
    on_gpu, on_cpu = (plan(recipe(), shape, Machine(named(gpu), 2)) for gpu in ("h100", "cpu"))
    facts = [plan_json(each)["asked"] for each in (on_gpu, on_cpu)]
    assert [(each["precision"], each["compile"]) for each in facts] == [COMPILED, EAGER]
    assert plan_json(on_cpu)["settled"] == [
        "train.precision: auto is fp32 on a CPU",
        "train.compile: auto is false on a CPU",
    ]
    laid = on_gpu.asked[0].choice
    assert laid is not None
    assert is_settled(laid.recipe)


def test_a_search_over_devices_takes_the_values_of_each() -> None:
    shape = preset("llama-1m").sized(1000, 512)
    small = replace(named("t4"), devices_per_node=1)
    for hardware, expected in ((named("a100-80"), COMPILED), (small, EAGER)):
        training = search(recipe(), shape, hardware, 1)[0].choice.training
        assert (training.precision, training.compiled) == expected

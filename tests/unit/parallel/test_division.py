from dataclasses import replace
from typing import Any

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import Size, add_adapters, chosen_sizes
from pipelines.models.presets import preset
from pipelines.models.transformer import Transformer
from pipelines.parallel.division import check_division, gathers_in_fp8, stage_layers
from pipelines.parallel.layout import Layout
from pipelines.parallel.pipeline_parallel import part_of, stages_of
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Adapter

CONFIG = DecoderConfig(
    layers=4, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=50, context_length=16
)


MX = {"train": {"precision": "fp8", "fp8_scaling": "mx"}}
ASYNC = {"parallel": {"tp": 2, "async_tp": True}}


def test_a_head_as_large_as_layers_makes_the_last_stage_shorter() -> None:
    assert [len(each) for each in stage_layers(replace(CONFIG, vocab_size=8), 2)] == [2, 2]
    assert [len(each) for each in stage_layers(replace(CONFIG, vocab_size=1000), 2)] == [3, 1]


@pytest.mark.parametrize(
    ("layout", "recipe", "line"),
    [
        (Layout(tp=4), {}, r"tp\(4\) does not divide the model's kv_heads\(2\)"),
        (Layout(tp=2), {"data": {"sequence_length": 15}}, r"sequence_length\(15\)"),
        (Layout(cp=8), {}, r"cp\(8\) does not divide the model's heads\(4\)"),
        (Layout(cp=4, tp=2), {}, r"cp\(4\) .* heads\(2\) of each of parallel\.tp\(2\)"),
        (
            Layout(cp=2),
            {"data": {"sequence_length": 15}},
            r"cp\(2\) does not divide data\.s.*h\(15\)",
        ),
        (
            Layout(cp=2, tp=2),
            {"data": {"sequence_length": 14}},
            r"tp\(2\) \* cp\(2\) does not divide data\.sequence_length\(14\)",
        ),
        (
            Layout(tp=2),
            {"adapter": {"kind": "qlora"}},
            r"tp\(2\): .* blocks of 64 don't divide the 32 numbers of a row of q_proj",
        ),
        (
            Layout(tp=2),
            {"adapter": {"kind": "qlora", "targets": ["down_proj"]}},
            r"tp\(2\): .* blocks of 64 don't divide the 24 numbers of a row of down_proj",
        ),
        (
            Layout(tp=2),
            ASYNC | {"train": {"compile": False}},
            "async_tp: not with train.compile = f",
        ),
        (
            Layout(cp=2),
            MX | {"data": {"sequence_length": 96}},
            r"sequence_length\(96\) over parallel\.cp\(2\): not with .* = mx, .* of 32 positions",
        ),
        (Layout(tp=2), MX, r"tp\(2\): .* blocks of 32 don't divide the 16 numbers of q_proj"),
        (Layout(tp=2), ASYNC | {"train": {"precision": "fp8"}}, "async_tp: not with .* = fp8"),
        (
            Layout(tp=2),
            {"adapter": {"kind": "lora", "dropout": 0.1}},
            r"tp\(2\): not with adapter\.dropout\(0\.1\)",
        ),
        (
            Layout(pp=2),
            {"adapter": {"kind": "lora", "dropout": 0.1}},
            r"pp\(2\) \* tp\(1\): not with adapter\.dropout\(0\.1\)",
        ),
        (Layout(pp=8), {}, "8 stages, but the model only 4 layers"),
        (
            Layout(pp=4),
            {"parallel": {"schedule": "zero_bubble"}},
            "8 stages, but the model only 4 layers",
        ),
        (
            Layout(pp=2),
            {"parallel": {"schedule": "zero_bubble"}, "train": {"compile": True}},
            "train.compile: not with parallel.schedule = zero_bubble",
        ),
        (Layout(pp=4), {"train": {"micro_batch_size": 8}}, r"can't run 2 micro-batches"),
    ],
)
def test_what_does_not_divide_is_one_line_with_its_numbers(
    layout: Layout, recipe: dict[str, object], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        check_division(CONFIG, layout, Recipe.model_validate({"name": "t"} | recipe))


@pytest.mark.parametrize(
    ("layout", "recipe", "line"),
    [
        (Layout(), {"train": {"precision": "fp8"}}, "precision = fp8: not with a mixture"),
        (
            Layout(),
            {"adapter": {"kind": "qlora", "targets": ["q_proj", "up_proj"]}},
            r"adapter\.kind = qlora: not on the experts of a mixture, .* adapter\.targets",
        ),
        (
            Layout(dp_shard=4),
            {"train": {"global_batch_size": 6, "micro_batch_size": 1}},
            r"global_batch_size\(6\): .* micro_batch_size\(1\) \* data-parallel processes\(4\)",
        ),
    ],
)
def test_what_a_mixture_of_experts_has_not_is_one_line(
    layout: Layout, recipe: dict[str, object], line: str
) -> None:
    mixture = replace(CONFIG, experts=4, experts_per_token=2)
    given = Recipe.model_validate({"name": "t"} | recipe)
    check_division(CONFIG, layout, given)
    with pytest.raises(UserError, match=line):
        check_division(mixture, layout, given)


@pytest.mark.parametrize(
    ("layout", "changes", "line"),
    [
        (Layout(dp_shard=3), {"ep": 3}, r"ep\(3\) does not divide the model's experts\(4\)"),
        (Layout(dp_shard=2), {"ep": 4}, r"ep\(4\) does not divide parallel\.dp_shard \* cp\(2\)"),
        (
            Layout(dp_replicate=2),
            {"ep": 2, "sharding": "none"},
            "not with parallel.sharding = none",
        ),
        (Layout(dp_shard=10), {"ep": 2}, r"ep\(5\) does not divide the 32 numbers of .* width"),
    ],
)
def test_experts_that_do_not_divide_are_one_line(
    layout: Layout, changes: dict[str, object], line: str
) -> None:
    mixture = replace(CONFIG, experts=4, experts_per_token=2)
    parallel = {"sharding": "full"} | changes
    train = {"global_batch_size": 60, "micro_batch_size": "auto"}
    recipe = Recipe.model_validate({"name": "t", "parallel": parallel, "train": train})
    with pytest.raises(UserError, match=line):
        check_division(mixture, layout, recipe)
    with pytest.raises(UserError, match=rf"ep\({changes['ep']}\): the model has no experts"):
        check_division(CONFIG, layout, recipe)


def test_products_with_biases_overlap_with_nothing() -> None:
    recipe = Recipe.model_validate({"name": "t"} | ASYNC)
    check_division(CONFIG, Layout(tp=2), recipe)
    for biased in ({"qkv_bias": True}, {"output_bias": True}, {"mlp_bias": True}):
        with pytest.raises(UserError, match="async_tp: not with a model whose products add biases"):
            check_division(replace(CONFIG, **biased), Layout(tp=2), recipe)


def test_moments_in_8_bits_of_adapters_on_divided_experts_are_one_line() -> None:
    mixture = replace(CONFIG, experts=4, experts_per_token=2)
    made = {"name": "t", "parallel": {"ep": 2, "sharding": "full"}}
    made |= {"train": {"optimizer": "adamw_8bit"}, "adapter": {"kind": "lora"}}
    with pytest.raises(UserError, match=r"adamw_8bit: not with parallel\.ep\(2\)"):
        check_division(mixture, Layout(dp_shard=2), Recipe.model_validate(made))
    attention = made | {"adapter": {"kind": "lora", "targets": ["q_proj"]}}
    check_division(mixture, Layout(dp_shard=2), Recipe.model_validate(attention))


def test_adapters_can_be_divided_where_blocks_of_64_end_with_each_process() -> None:
    wide = replace(CONFIG, width=128, hidden=128)
    recipe = Recipe.model_validate({"name": "t", "adapter": {"kind": "qlora"}})
    for layout in (Layout(pp=2), Layout(tp=2), Layout(pp=2, tp=2)):
        check_division(wide, layout, recipe)
    # A quantised matrix that is not divided at borders of its blocks has no adapter.
    odd = {"name": "t", "adapter": {"kind": "qlora", "targets": ["q_proj", "o_proj"]}}
    check_division(replace(wide, hidden=96), Layout(tp=2), Recipe.model_validate(odd))


def test_mxfp8_divides_into_whole_blocks_what_it_rounds() -> None:
    recipe = Recipe.model_validate({"name": "t", "data": {"sequence_length": 64}} | MX)
    # Keys, of which there are 32, and a hidden size of 80 stay in bf16 under every layout.
    check_division(replace(CONFIG, width=64, kv_heads=4, hidden=80), Layout(tp=2, cp=2), recipe)
    with pytest.raises(UserError, match=r"tp\(2\): .* the 48 numbers of up_proj"):
        check_division(replace(CONFIG, width=64, kv_heads=4, hidden=96), Layout(tp=2), recipe)


def test_a_stage_that_loaded_adapters_leave_out_is_refused() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
        names = [name for name in chosen_sizes(model, Adapter()) if "layers.3" in name]
        add_adapters(model, dict.fromkeys(names, Size(2, 1.0)), Adapter(kind="lora"))
    assert len(stages_of(model, 1, "gpipe")) == 1
    with pytest.raises(UserError, match=r"pp\(2\): the stage of layers 0 to 1 has nothing"):
        stages_of(model, 2, "gpipe")


def test_key_value_heads_and_context_parallel_processes_divide_one_another() -> None:
    wide = replace(CONFIG, width=96, heads=12, kv_heads=6)
    recipe = Recipe.model_validate({"name": "t", "data": {"sequence_length": 48}})
    for cp in (2, 3, 6, 12):
        check_division(wide, Layout(cp=cp), recipe)
    with pytest.raises(UserError, match=r"cp\(4\) and the model's kv_heads\(6\): one must divide"):
        check_division(wide, Layout(cp=4), recipe)


def test_odd_sequences_can_be_divided_without_sequence_parallelism() -> None:
    recipe = {"data": {"sequence_length": 15}, "parallel": {"sequence_parallel": False}}
    check_division(CONFIG, Layout(tp=2), Recipe.model_validate({"name": "t"} | recipe))


@pytest.mark.parametrize("tied", [True, False])
def test_parts_in_a_row_are_the_model(tied: bool) -> None:
    model = Transformer(replace(CONFIG, tie_embeddings=tied))
    model.init_weights(0)
    parts = [part_of(model, layers) for layers in stage_layers(model.config, 3)]
    assert [part.tied_copy is None for part in parts] == [True, True, not tied]
    tokens = torch.arange(32).view(2, 16)
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"layout": Layout(dp_shard=24)}, False),  # 1,024 rows of keys
        ({"layout": Layout(dp_shard=64, tp=8)}, True),
        ({"layout": Layout(dp_shard=256, tp=8)}, False),
        ({"precision": "bf16"}, False),
        ({"scaling": "rowwise"}, False),
        ({"offloaded": True}, False),
    ],
)
def test_weights_travel_in_fp8_where_all_processes_have_equally_many_rows(
    changes: dict[str, Any], expected: bool
) -> None:
    usual = {"layout": Layout(dp_shard=64), "precision": "fp8", "scaling": "tensorwise"}
    asked = usual | {"offloaded": False} | changes
    assert gathers_in_fp8(preset("llama3-8b"), **asked) is expected

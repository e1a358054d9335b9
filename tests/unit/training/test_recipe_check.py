import json
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.recipe.recipe_files import load_recipe, shipped_recipes
from pipelines.training.recipe_check import check_recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_run(name: str) -> None:
    recipe = load_recipe(name)
    start = recipe.model.init_from
    if start is None or start.startswith("models:/"):  # which the registry knows, not a folder
        check_recipe(recipe)
        return
    with pytest.raises(UserError, match=rf"{recipe.model.init_from}: no config\.json"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("parallel.tp=3", r"tp\(3\) = 3 processes, but there are 2"),
        ("parallel.pp=4", r"pp\(4\) .* = 4 processes, but there are 2"),
        ("parallel.dp_replicate=3", r"dp_replicate\(3\) .* = 3 processes, but there are 2"),
        ("parallel.dp_shard=2", r"dp_shard\(2\) shards nothing"),
        ("parallel.cp=4", r"cp\(4\) \* tp\(1\) = 4 processes, but there are 2"),
        ("parallel.cpu_offload=true", r"cpu_offload: not with parallel\.sharding = none"),
        ("adapter.kind=lora", r"adapter\.kind = 'lora'"),
        ("resources.workers=99", r"99 data-parallel processes"),
        ("resources.workers=[1, 99]", r"99 data-parallel processes"),
        ("model.preset=lama-1m", "did you mean llama-1m"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(override: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_recipe(load_recipe("debug", [override]))


def test_every_number_of_workers_must_give_a_layout() -> None:
    with pytest.raises(UserError, match=r"tp\(2\) = 2 processes, but there are 3"):
        check_recipe(load_recipe("debug", ["parallel.tp=2", "resources.workers=[2, 4]"]))


def test_fp8_is_compiled() -> None:
    eager = ["train.precision=fp8", "train.compile=false"]
    with pytest.raises(UserError, match=r"without train\.compile = true it is slower than bf16"):
        check_recipe(load_recipe("debug", eager))
    check_recipe(load_recipe("debug", eager[:1]))  # auto compiles it


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.precision=fp32"], "takes bf16 and fp16, but train.precision is fp32; change that"),
        (["train.precision=tf32"], "takes bf16 and fp16, but train.precision is tf32"),
    ],
)
def test_what_varlen_attn_does_not_take(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=rf"train\.attention = varlen: .*{line}"):
        check_recipe(load_recipe("debug", ["train.attention=varlen", *overrides]))
    check_recipe(load_recipe("debug", ["train.attention=varlen"]))  # where auto is bf16


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["parallel.tp=4"], r"tp\(4\) does not divide the model's kv_heads\(2\)"),
        (["parallel.pp=4"], r"4 stages, but the model only 2 layers"),
        (
            ["parallel.cp=4", "data.sequence_length=30"],
            r"cp\(4\) does not divide data\.s.*h\(30\)",
        ),
    ],
)
def test_a_layout_must_divide_the_model(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_recipe(load_recipe("debug", ["resources.workers=4", *overrides]))


def test_the_optimizers_state_is_not_sharded_over_tensor_parallel_processes() -> None:
    overrides = ["parallel.tp=2", "parallel.sharding=optimizer", "resources.workers=4"]
    with pytest.raises(UserError, match=r"sharding = optimizer: not with parallel\.tp\(2\)"):
        check_recipe(load_recipe("debug", overrides))


LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (None, r"no config\.json"),
        ({"model_type": "bert", "hidden_size": 32}, "model_type = 'bert'; supported"),
        (LLAMA, r"its context is 24 tokens, but data\.sequence_length = 25; set at most 24"),
        (LLAMA | {"max_position_embeddings": 25}, r"no model\.safetensors"),
    ],
)
def test_a_model_that_cannot_be_gone_on_from(tmp_path: Path, config: object, line: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = [f"model.init_from={tmp_path}", "data.sequence_length=25"]
    with pytest.raises(UserError, match=line):
        check_recipe(load_recipe("debug", overrides))

"""Recipes: what a user writes, and the one line they read when it is wrong."""

import traceback

import pytest
import yaml

from pipelines.core.errors import UserError
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import (
    dump_yaml,
    leaves,
    load_recipe,
    parse_overrides,
    shipped_recipes,
    with_absolute_paths,
)


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_loads_and_survives_yaml(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert Recipe.model_validate(yaml.safe_load(dump_yaml(recipe))) == recipe


def test_overrides_are_typed_by_the_models():
    recipe = load_recipe(
        "debug", ["train.lr=1e-4", "resources.workers=[1, 4]", "register.model_name=7"]
    )
    assert recipe.train.lr == 1e-4
    assert recipe.resources.workers == (1, 4)
    assert recipe.registration.model_name == "7"


def mixture(weights: str) -> Recipe:
    return load_recipe("debug", ["data.source.kind=mixture", f"data.source.mixture={weights}"])


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("{web@3: 0.7, code@1: 0.3}", {"code@1": 3, "web@3": 7}),
        ("{a: 2, b: 4}", {"a": 1, "b": 2}),
        ("{a: 1, b: 1.0, c: 1}", {"a": 1, "b": 1, "c": 1}),
        ("{a: 0.125, b: 3e-2}", {"a": 25, "b": 6}),
        ("{a: 0.1, b: 0.2}", {"a": 1, "b": 2}),  # as written, not as binary fractions
    ],
)
def test_weights_become_the_smallest_whole_numbers(given, whole):
    source = mixture(given).data.source
    assert source.weights == whole
    assert list(source.weights) == sorted(whole)  # whatever order a store of JSON gives back


def test_weights_that_hardly_come_out_even_are_refused():
    with pytest.raises(UserError, match="exact only after 4333333333 samples, more than 10000"):
        mixture("{a: 0.3333333333, b: 0.1}")


def test_the_fingerprint_follows_every_value():
    recipe = load_recipe("debug")
    assert recipe.fingerprint() == load_recipe("debug").fingerprint()
    assert recipe.fingerprint() != load_recipe("debug", ["evaluate.max_bytes=1"]).fingerprint()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stepz=3", "unknown key train.stepz = 3; did you mean train.steps?"),
        ("trian.steps=3", "did you mean train?"),
        ("train.steps=abc", "train.steps = 'abc': Input should be a valid integer"),
        ("train.steps=0", "train.steps = 0: Input should be greater than or equal to 1"),
        ("resources.workers=x", "resources.workers = 'x'"),
        (
            "resources.workers=0",
            "resources.workers = 0: Input should be greater than or equal to 1",
        ),
        ("resources.workers=[3, 1]", "give the least first"),
        ("seed=-1", "seed = -1: Input should be greater than or equal to 0"),
        ("train.lr=.inf", "train.lr = inf: Input should be a finite number"),
        ("train.precision=fp7", "'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'"),
        ("data.source.kind=files", "needs data.source.path"),
        ("data.instruction.kind=preference", "set data.packing to best_fit and data.document_mask"),
        ("data.source.kind=mixture", "needs data.source.mixture: two or more dataset versions"),
        (
            "data.source.mixture={a: 1, b: 2}",
            "kind is `stdlib`, but data.source.mixture names a, b",
        ),
        ("data.source.mixture={a: 0, b: 1}", "data.source.mixture = 0: Input should be greater"),
        ("data.tokenizer.kind=pretrained", "needs data.tokenizer.path"),
        ("train.global_batch_size=7", "global_batch_size(7) must be a multiple of"),
        ("train.steps.more=1", "--set train.steps.more: steps is a single value"),
        ("train.steps", "write key=value"),
        ("train.steps=[", "--set 'train.steps=['"),
    ],
)
def test_a_wrong_override_is_one_line(override, line):
    with pytest.raises(UserError) as error:
        load_recipe("debug", [override])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.source.path=https://me:s3cret@example.invalid/x.txt",
        "data.source.path=https://s3cret@example.invalid/x.txt",
        "data.source.path=simplecache::sftp://me:s3cret@example.invalid/x.txt",
        "data.decontamination.against=[https://me:s3cret@example.invalid/exam.txt]",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(override):
    with pytest.raises(UserError, match="holds a password or token") as raised:
        load_recipe("debug", [override])
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("url", ["s3://b/a:b@c/x", "sftp://me@host/x", "https://host/a@b:c@d"])
def test_other_urls_are_taken(url):
    overrides = ["data.source.kind=files", f"data.source.path={url}"]
    assert load_recipe("debug", overrides).data.source.path == url


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"name: [", "not valid YAML"),
        (b"- a list", "a recipe is a mapping of sections"),
        (b"", "a recipe is a mapping of sections"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"train: {steps: 3}", "name is missing"),
        (b"name: a b", "name = 'a b'"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path, content, line):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert line in str(error.value)
    assert "broken.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean debug"):
        load_recipe("debg")
    with pytest.raises(UserError, match="does not exist"):
        load_recipe("missing/of/mine.yaml")


def test_paths_become_absolute_and_addresses_stay(tmp_path):
    recipe = load_recipe("debug", ["data.source.kind=files", "data.source.path=some/text"])
    assert with_absolute_paths(recipe, tmp_path).data.source.path == str(tmp_path / "some/text")
    remote = load_recipe("debug", ["data.source.kind=files", "data.source.path=s3://bucket/text"])
    assert with_absolute_paths(remote, tmp_path) == remote


def test_every_path_becomes_absolute_but_a_dataset_of_the_hub_keeps_its_name(tmp_path):
    (tmp_path / "mine").mkdir()
    for path, expected in (("owner/name", "owner/name"), ("mine", str(tmp_path / "mine"))):
        recipe = load_recipe(
            "debug",
            [
                "data.source.kind=huggingface",
                f"data.source.path={path}",
                "data.instruction.chat_template=a.jinja",
                "data.decontamination.against=[b.jsonl, s3://c/d]",
                "evaluate.bias.templates=own.json",
            ],
        )
        absolute = with_absolute_paths(recipe, tmp_path)
        assert absolute.evaluate.bias.templates == str(tmp_path / "own.json")
        data = absolute.data
        assert data.source.path == expected
        assert data.instruction.chat_template == str(tmp_path / "a.jinja")
        assert data.decontamination.against == (str(tmp_path / "b.jsonl"), "s3://c/d")


def test_the_forms_set_field_takes_lines_and_semicolons():
    assert parse_overrides("train.lr=1\n seed = 2 ;\n") == {"train.lr": 1, "seed": 2}
    assert parse_overrides("") == {}


def test_about_fifteen_leaves_are_in_the_trigger_form():
    shown = [leaf.key for leaf in leaves() if leaf.in_trigger_form]
    assert 12 <= len(shown) <= 18
    assert {"train.steps", "data.source.path", "model.preset"} <= set(shown)

"""A run that starts from registered models: which version, from where, and under which key."""

import re

import pytest

from pipelines.core.errors import UserError
from pipelines.recipe.recipe_files import load_recipe, with_absolute_paths
from pipelines.registry import registry
from pipelines.registry.parents import name_versions, settle_run, with_folders
from pipelines.registry.promotion import promote, rollback
from pipelines.registry.registration import register
from pipelines.stage_cache.open_workspace import environment
from pipelines.tracking.tracked_run import MODEL_HASH_TAG


@pytest.fixture
def add(tiny_model, tmp_path, name, mlflow_run):
    """Registers the model with a card; each call makes another version."""

    def make(content, parent=None, adapter=False):
        card = tmp_path / f"card-{content}"
        card.mkdir()
        (card / "README.md").write_text(content)
        if adapter:
            (card / "adapter").mkdir()
            (card / "adapter/adapter_config.json").write_text("{}")
        tags = {MODEL_HASH_TAG: content} | ({registry.PARENT_TAG: parent} if parent else {})
        return register([tiny_model, card], name, mlflow_run, tags, "")

    return make


def asks(name, which="champion", *more):
    overrides = (f"model.init_from=models:/{name}@{which}", "data.tokenizer.kind=model", *more)
    return load_recipe("debug", overrides)


def test_an_alias_is_named_once_and_for_all(add, name):
    first, second = add("aa"), add("bb")
    promote(first, None, "ada", "")
    run = settle_run(asks(name))
    assert run.recipe.model.init_from == f"models:/{name}@1"
    assert run.recipe.data.tokenizer.path is None
    promote(second, 1, "ada", "")
    assert name_versions(run.recipe) == run.recipe  # a promotion meanwhile changes nothing
    assert name_versions(asks(name)).model.init_from == f"models:/{name}@2"
    rollback(name, 2, "ada", "")
    assert name_versions(asks(name)).model.init_from == f"models:/{name}@1"


def test_stages_read_the_verified_folder_its_tokenizer_with_it(add, name):
    promote(add("aa"), None, "ada", "")
    run = settle_run(asks(name))
    folder = registry.download(name)
    assert run.ready.model.init_from == run.ready.data.tokenizer.path == str(folder)
    assert run.source["tokenizer"][0]["path"] == "tokenizer.json"
    assert with_folders(run.recipe).model == run.ready.model
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json"):
        with_folders(run.recipe)


def test_equal_weights_are_one_key_whatever_version_they_are(add, name, tiny_model, tmp_path):
    add("aa"), add("bb")
    keys = {environment(tmp_path, settle_run(asks(name, n)).ready)["init_from"] for n in (1, 2)}
    by_folder = load_recipe("debug", [f"model.init_from={tiny_model}"])
    assert keys == {environment(tmp_path, by_folder)["init_from"]}


@pytest.mark.parametrize("reference", ["models:/nobody", "models:/@3", "models:/a/7", "models:/a@"])
def test_a_reference_without_a_version_is_one_line(reference):
    with pytest.raises(UserError, match="give models:/NAME@champion or models:/NAME@7"):
        load_recipe("debug", [f"model.init_from={reference}"])


def test_what_is_not_registered_is_refused(add, name):
    add("aa")
    with pytest.raises(UserError, match=rf"^model.init_from = models:/{name}@champion: {name} has"):
        settle_run(asks(name))
    with pytest.raises(UserError, match="no model is registered as 'no-such'"):
        settle_run(asks("no-such"))


def test_adapters_of_a_registered_model_go_on(add, name):
    add("aa", adapter=True), add("bb")
    start = asks(name, 1, f"adapter.init_from=models:/{name}@1", "adapter.kind=lora")
    assert with_folders(start).adapter.init_from == str(registry.download(name, "1") / "adapter")
    other = asks(name, 1, f"adapter.init_from=models:/{name}@2", "adapter.kind=lora")
    with pytest.raises(UserError, match=r"adapter\.init_from .*trained without adapters"):
        with_folders(other)


def test_a_reference_is_no_path(tmp_path):
    recipe = asks("a-model", 3)
    assert with_absolute_paths(recipe, tmp_path).model.init_from == "models:/a-model@3"


def test_the_tokenizer_of_no_model_is_refused():
    told = re.escape("data.tokenizer.kind `model` is the tokenizer of model.init_from")
    with pytest.raises(UserError, match=told):
        load_recipe("debug", ["data.tokenizer.kind=model"])


def test_the_line_of_descent_ends_where_a_version_was_deleted(add, name, mlflow_client):
    add("aa"), add("bb", parent=f"{name}@1")
    third = add("cc", parent=f"{name}@2")
    assert registry.descent(third) == [f"{name}@1", f"{name}@2", f"{name}@3"]
    mlflow_client.delete_model_version(name, "2")
    assert registry.descent(third) == [f"{name}@2", f"{name}@3"]

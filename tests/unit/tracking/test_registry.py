import itertools

import pytest

from pipelines.core.errors import UserError
from pipelines.tracking import registry

_names = (f"model-{number}" for number in itertools.count())


@pytest.fixture
def name(mlflow_client):
    return next(_names)


@pytest.fixture
def folders(tmp_path):
    model, card = tmp_path / "model", tmp_path / "card"
    model.mkdir()
    card.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (card / "README.md").write_text("# a model")
    return [model, card]


def tags(content):
    return {registry.MODEL_HASH_TAG: content}


def crown(*arguments):
    """Register and promote."""
    return registry.promote(registry.register(*arguments))


def test_no_model_no_champion(name):
    assert registry.champion(name) is None
    with pytest.raises(UserError, match="no model is registered"):
        registry.show(name)


def test_a_registered_model_is_the_champion_and_its_folder_is_whole(name, folders, mlflow_run):
    version = crown(folders, name, mlflow_run, tags("aa"), "the first")
    assert version == registry.champion(name)
    assert (version.version, version.aliases, version.model_hash) == (1, ("champion",), "aa")
    assert (version.run_id, version.description) == (mlflow_run, "the first")
    files = {path.name for path in registry.download(name).iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md", "MLmodel"}


@pytest.mark.parametrize("name", ["my.model v1", ".v2.", "größe_3"])
def test_a_name_that_a_recipe_allows_can_be_registered(name, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    assert registry.find(name).ref.name == name
    assert (registry.download(name) / "config.json").is_file()


def test_a_retry_registers_nothing_new_and_says_what_is_true_now(name, folders, mlflow_run):
    first = registry.register(folders, name, mlflow_run, tags("aa"), "a person decides")
    assert (first.version, first.aliases, registry.champion(name)) == (1, (), None)
    again = crown(folders, name, mlflow_run, tags("aa") | {"verdict": "promoted"}, "approved")
    assert (again.version, again.aliases, again.description) == (1, ("champion",), "approved")
    assert again.tags["verdict"] == "promoted"
    assert len(registry.show(name)) == 1


def test_of_versions_that_a_dying_server_doubled_the_oldest_stays(name, folders, mlflow_run):
    from pipelines.tracking.client import open_client

    first = registry.register(folders, name, mlflow_run, tags("aa"), "")
    open_client().create_model_version(name, first.source, mlflow_run, tags=tags("aa"))
    assert len(registry.show(name)) == 2
    again = registry.register(folders, name, mlflow_run, tags("aa"), "")
    assert (again.version, len(registry.show(name))) == (1, 1)


def test_the_alias_moves_and_old_versions_stay(name, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    second = crown(folders, name, mlflow_run, tags("bb"), "")
    assert [(each.version, each.aliases) for each in registry.show(name)] == [
        (2, ("champion",)),
        (1, ()),
    ]
    assert registry.find(name, "1").model_hash == "aa"
    listed = next(model for model in registry.list_models() if model.name == name)
    assert (listed.latest, listed.champion) == (2, second.version)
    with pytest.raises(UserError, match="no version or alias 'staging'"):
        registry.find(name, "staging")


def test_a_model_without_a_run(name, folders, mlflow_client, monkeypatch, tmp_path):
    mlflow_client.create_experiment(name, artifact_location=str(tmp_path / "artifacts"))
    assert crown(folders, name, None, tags("aa"), "").run_id is None


def test_files_that_are_gone_are_said_to_be(name, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    (registry.download(name) / "config.json").unlink()
    with pytest.raises(UserError, match="its files are gone"):
        registry.download(name)


def test_a_near_name_is_suggested(name, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    with pytest.raises(UserError, match=f"did you mean {name[:5]}"):
        registry.show("modle")

import shutil

import pytest

from pipelines.core.errors import UserError
from pipelines.registry import registry
from pipelines.registry.promotion import promote
from pipelines.registry.registration import register
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.s3_server import s3_bucket

FILES = {"config.json", "model.safetensors", "README.md", "MLmodel", "model.sig"}


def tags(content):
    return {MODEL_HASH_TAG: content}


def crown(*arguments):
    """Register and promote."""
    version = register(*arguments)
    champion = registry.champion(version.name)
    return promote(version, champion and champion.version, "ada", "a test")


def test_no_model_no_champion(name):
    assert registry.champion(name) is None
    with pytest.raises(UserError, match="no model is registered"):
        registry.show(name)


def test_a_registered_model_is_the_champion_and_its_folder_is_whole(name, folders, mlflow_run):
    version = crown(folders, name, mlflow_run, tags("aa"), "the first")
    assert version == registry.champion(name)
    assert (version.version, version.aliases, version.model_hash) == (1, ("champion",), "aa")
    assert (version.run_id, version.description) == (mlflow_run, "the first")
    assert {path.name for path in registry.download(name).iterdir()} == FILES


@pytest.mark.parametrize("name", ["my.model v1", ".v2.", "größe_3"])
def test_a_name_that_a_recipe_allows_can_be_registered(name, home, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    assert registry.find(name).ref.name == name
    assert (registry.download(name) / "config.json").is_file()


@pytest.mark.parametrize("wrong", ["a/b", "..", "../models", "", "it's", "a\nb"])
def test_what_is_no_name_is_one_line_before_anything_is_asked(wrong, home):
    with pytest.raises(UserError, match="is not a model's name"):
        registry.find(wrong)


def test_a_retry_registers_nothing_new_and_says_what_is_true_now(name, folders, mlflow_run):
    first = register(folders, name, mlflow_run, tags("aa"), "a user decides")
    assert (first.version, first.aliases, registry.champion(name)) == (1, (), None)
    again = crown(folders, name, mlflow_run, tags("aa") | {"verdict": "promoted"}, "approved")
    assert (again.version, again.aliases, again.description) == (1, ("champion",), "approved")
    assert again.tags["verdict"] == "promoted"
    assert len(registry.show(name)) == 1


def test_of_versions_that_a_dying_server_doubled_the_oldest_stays(name, folders, mlflow_run):
    from pipelines.tracking.mlflow_client import open_client

    first = register(folders, name, mlflow_run, tags("aa"), "")
    open_client().create_model_version(name, first.source, mlflow_run, tags=tags("aa"))
    assert len(registry.show(name)) == 2
    again = register(folders, name, mlflow_run, tags("aa"), "")
    assert (again.version, len(registry.show(name))) == (1, 1)


def test_the_aliases_move_and_old_versions_stay(name, folders, mlflow_run):
    crown(folders, name, mlflow_run, tags("aa"), "")
    crown(folders, name, mlflow_run, tags("bb"), "")
    assert [(each.version, each.aliases) for each in registry.show(name)] == [
        (2, ("champion",)),
        (1, ("previous",)),
    ]
    assert registry.find(name, "1").model_hash == "aa"
    listed = next(model for model in registry.list_models() if model.name == name)
    assert listed == registry.RegisteredModel(name, 2, champion=2, challenger=None, previous=1)
    with pytest.raises(UserError, match="no version or alias 'staging'"):
        registry.find(name, "staging")


def test_a_model_without_a_run(name, folders, mlflow_client, tmp_path):
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


def test_a_model_that_may_not_be_is_not_registered(name, folders, mlflow_run, home):
    (folders[1] / "extra.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"extra\.bin: a model holds safetensors"):
        register(folders, name, mlflow_run, tags("aa"), "")
    assert registry.versions_of(name) == []
    assert not list(home.glob(".register.*"))


def test_without_a_key_nothing_is_registered(name, folders, mlflow_run, home):
    (home / "secrets" / "model-signing.pem").unlink()
    with pytest.raises(UserError, match=r"model-signing\.pem: no key to sign the model with"):
        register(folders, name, mlflow_run, tags("aa"), "")
    assert registry.versions_of(name) == []


def tampered(folder, how):
    """A kept model, after somebody was at it."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "altered":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "missing":
        weights.unlink()
    elif how == "extra":
        (folder / "adapter.json").write_text("{}")
    elif how == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    elif how == "remote code":
        config.write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    elif how == "unsigned":
        (folder / "model.sig").unlink()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("altered", "is not what was signed: altered model.safetensors"),
        ("truncated", "model.safetensors: not a whole safetensors file: "),
        ("missing", "is not what was signed: missing model.safetensors"),
        ("extra", "is not what was signed: extra adapter.json"),
        ("pickle", "pytorch_model.bin: a model holds safetensors, JSON and text only"),
        ("remote code", "config.json: 'auto_map' asks for code to be imported"),
        ("unsigned", "is not signed"),
    ],
)
def test_a_model_that_somebody_was_at_is_neither_loaded_nor_promoted(
    name, folders, mlflow_run, how, line
):
    version = register(folders, name, mlflow_run, tags("aa"), "")
    tampered(registry.verified_folder(version), how)
    for use in (
        lambda: registry.download(name, "1"),
        lambda: promote(version, None, "ada", "it is the best"),
    ):
        with pytest.raises(UserError) as error:
            use()
        assert line in str(error.value)
        assert str(error.value).startswith(version.label)
        assert "\n" not in str(error.value)
    assert registry.champion(name) is None


def test_a_signed_model_in_anothers_place_is_refused(name, folders, mlflow_run):
    good, old = (register(folders, name, mlflow_run, tags(each), "") for each in ("aa", "bb"))
    place = registry.verified_folder(good)
    shutil.rmtree(place)
    shutil.copytree(registry.verified_folder(old), place)
    with pytest.raises(UserError, match="holds the logged model m-"):
        registry.verified_folder(good)


def test_a_model_in_a_bucket_is_fetched_whole_and_once_and_verified_each_time(
    name, folders, mlflow_client, home
):
    with s3_bucket("models") as bucket:
        experiment = mlflow_client.create_experiment(name, artifact_location="s3://models/mlflow")
        crown(folders, name, mlflow_client.create_run(experiment).info.run_id, tags("aa"), "")
        kept = registry.download(name)
        assert kept.is_relative_to(home / "models" / name)
        assert {path.name for path in kept.iterdir()} == FILES
        bucket.objects.delete()
        assert registry.download(name) == kept
        (kept / "README.md").write_text("# another model")
        with pytest.raises(UserError, match=r"altered README\.md"):
            registry.download(name)


def test_the_folders_are_left_as_they_were_and_the_later_ones_files_count(
    name, folders, mlflow_run
):
    model, card = folders
    for each in ("README.md", "MLmodel", "model.sig"):  # as of a version that was downloaded
        (model / each).write_text('{"old": 1}')
    before = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    version = register(folders, name, mlflow_run, tags("aa"), "")
    assert {path: path.read_bytes() for path in before} == before
    registered = registry.verified_folder(version)
    assert (registered / "README.md").read_text() == (card / "README.md").read_text()

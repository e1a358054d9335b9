"""Dataset versions with the real git and the real DVC, in a folder with a space."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.datasets import dataset_publishing, dvc_objects, repository, versions
from pipelines.datasets.dataset_publishing import make
from pipelines.run.records import PreprocessRecord
from tests.unit.datasets.dataset_workspace import make_workspace, validate

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "the home"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    return home


def git(*arguments) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def store_objects(home: Path) -> list[Path]:
    return [path for path in (home / "dataset-store").rglob("*") if path.is_file()]


def flip_a_byte(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_version_says_what_it_is_and_comes_back_whole(tmp_path, home):
    workspace = make_workspace(tmp_path / "run", TEXT)
    made = make(workspace)
    assert made.label == "small@1"
    assert versions.list_versions() == [made] == [versions.find("small@1")]
    assert (made.documents, made.tokens) == (2, 2 * len(TEXT))
    assert made.validation["expectations"] == 3
    assert made.run["dag_run_id"] == "run"
    assert made.created is not None

    record = versions.fetch(made, tmp_path / "fetched")
    dataset = record.dataset
    assert (dataset.name, dataset.version) == ("small", 1)
    assert dataset.git_revision == git("-C", home / "datasets.git", "rev-parse", "small@1^{commit}")
    assert dataset.directory_hash == made.directory_hash
    assert dataset.remote == str(home / "dataset-store")
    written = (tmp_path / "fetched/record.json").read_text()
    assert PreprocessRecord.model_validate_json(written) == record
    for path in (workspace / "outputs/preprocess").rglob("*"):
        if path.is_file() and path.name != "record.json":
            copy = tmp_path / "fetched" / path.relative_to(workspace / "outputs/preprocess")
            assert copy.read_bytes() == path.read_bytes()
            assert os.access(copy, os.W_OK)


def test_each_shard_lies_in_the_remote_under_its_md5(tmp_path):
    dataset = versions.fetch(make(make_workspace(tmp_path / "run", TEXT)), tmp_path / "out").dataset
    for shard in (*dataset.train.shards, *dataset.validation.shards):
        for oid, name in ((shard.md5, shard.path), (shard.index_md5, shard.path[:-4] + ".idx")):
            lies = Path(dataset.remote) / "files/md5" / oid[:2] / oid[2:]
            assert lies.read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_without_token_shards_all_else_is_fetched(tmp_path):
    made = make(make_workspace(tmp_path / "run", TEXT))
    versions.fetch(made, tmp_path / "whole")
    versions.fetch(made, tmp_path / "part", token_shards=False)
    whole, part = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "part")
    )
    assert whole - part == {
        "tokens/train-00000.bin",
        "tokens/validation-00000.bin",
    }
    assert part < whole


def test_the_same_content_is_the_same_version(tmp_path):
    first = make(make_workspace(tmp_path / "one", TEXT))
    assert make(make_workspace(tmp_path / "two", TEXT)) == first
    second = make(make_workspace(tmp_path / "three", TEXT + "more\n"))
    assert second.label == "small@2"
    # An older version's content is news again.
    assert make(make_workspace(tmp_path / "four", TEXT)).label == "small@3"


def test_another_name_counts_from_one(tmp_path):
    make(make_workspace(tmp_path / "one", TEXT))
    assert make(make_workspace(tmp_path / "two", TEXT, name="other.name")).label == "other.name@1"
    assert [each.label for each in versions.list_versions()] == ["other.name@1", "small@1"]
    assert [each.label for each in versions.list_versions("small")] == ["small@1"]


def test_git_clone_and_dvc_pull_give_the_data(tmp_path, home):
    workspace = make_workspace(tmp_path / "run", TEXT)
    make(workspace)
    make(make_workspace(tmp_path / "next", TEXT + "more\n"))
    clone = tmp_path / "clone"
    git("clone", "--quiet", "--branch", "small@1", home / "datasets.git", clone)
    dvc = Path(sys.prefix) / "bin/dvc"
    subprocess.run([dvc, "pull"], cwd=clone, check=True, capture_output=True)
    pulled = clone / "small/data/documents/train.txt"
    assert pulled.read_text() == TEXT
    assert git("-C", clone, "status", "--porcelain") == ""
    assert git("-C", clone, "log", "--format=%s", "origin/main").splitlines() == [
        "small@2",
        "small@1",
    ]


def test_a_flipped_byte_is_found_and_named(tmp_path, home):
    made = make(make_workspace(tmp_path / "run", TEXT))
    assert list(versions.verify(made)) == []
    shard = made.dataset.train.shards[0]
    flip_a_byte(home / "dataset-store/files/md5" / shard.md5[:2] / shard.md5[2:])
    found = {file.path: why for file, why in versions.verify(made)}
    # The validation shard has the same content here, so it is the same object.
    assert set(found) == {"tokens/train-00000.bin", "tokens/validation-00000.bin"}
    assert found[shard.path].startswith("is damaged")
    with pytest.raises(UserError, match=f"tokens/.*-00000.bin: its object {shard.md5} .* damaged"):
        versions.fetch(made, tmp_path / "out")
    assert not (tmp_path / "out/record.json").exists()


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink])
def test_a_damaged_listing_is_one_line(tmp_path, home, damage):
    made = make(make_workspace(tmp_path / "run", TEXT))
    damage(home / "dataset-store/files/md5" / made.directory_hash[:2] / made.directory_hash[2:])
    with pytest.raises(UserError, match="the list of its files"):
        list(versions.verify(made))


def test_an_object_that_a_power_cut_left_short_is_pushed_again(tmp_path, home):
    """DVC trusts an object that is there and read-only."""
    workspace = make_workspace(tmp_path / "run", TEXT)
    made = make(workspace)
    for path in store_objects(home):
        path.chmod(0o644)
        path.write_bytes(b"")
        path.chmod(0o444)
    assert make(workspace) == made
    assert list(versions.verify(made)) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"relpath": "../../escaped", "md5": "0" * 32},
        {"relpath": "/escaped", "md5": "0" * 32},
        {"relpath": "inside", "md5": "../../../escaped"},
    ],
    ids=["above", "absolute", "object"],
)
def test_a_listing_that_leads_elsewhere_is_refused(tmp_path, home, entry):
    content = json.dumps([entry]).encode()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    path = home / "dataset-store" / "files/md5" / digest[:2] / f"{digest[2:]}.dir"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    store = dvc_objects.ObjectStore(str(home / "dataset-store"))
    with pytest.raises(UserError, match="not a file below"):
        store.listing(f"{digest}.dir")


def test_a_missing_object_is_found_and_named(tmp_path, home):
    made = make(make_workspace(tmp_path / "run", TEXT))
    oid = made.dataset.train.shards[0].index_md5
    (home / "dataset-store/files/md5" / oid[:2] / oid[2:]).unlink()
    assert ("tokens/train-00000.idx", "is missing") in [
        (file.path, why) for file, why in versions.verify(made)
    ]


def test_training_refuses_a_flipped_byte_before_its_first_step(tmp_path):
    from pipelines.loading.token_dataset import TokenDataset

    folder = tmp_path / "out"
    dataset = versions.fetch(make(make_workspace(tmp_path / "run", TEXT)), folder).dataset
    assert len(TokenDataset(folder, dataset.train, 32)) > 10
    shard = dataset.train.shards[0]
    flip_a_byte(folder / shard.path)
    with pytest.raises(UserError, match=f"{shard.path}.*damaged"):
        TokenDataset(folder, dataset.train, 32)


# What is refused.


def test_data_that_did_not_pass_the_gate_as_they_are_make_no_version(tmp_path):
    workspace = make_workspace(tmp_path / "run", TEXT)
    (workspace / "outputs/preprocess/documents/train.txt").write_text("tampered")
    with pytest.raises(UserError, match="not what `validate` passed"):
        make(workspace)
    (workspace / "dvc.lock").unlink()
    with pytest.raises(UserError, match="run validate again"):
        make(workspace)
    assert versions.list_versions() == []


def test_a_shard_that_is_not_what_its_record_says_makes_no_version(tmp_path):
    workspace = make_workspace(tmp_path / "run", TEXT)
    flip_a_byte(workspace / "outputs/preprocess/tokens/train-00000.bin")
    validate(workspace)
    with pytest.raises(UserError, match=r"train-00000\.bin is not what its record says"):
        make(workspace)


def test_a_version_of_a_version_is_refused(tmp_path):
    made = make(make_workspace(tmp_path / "run", TEXT))
    workspace = make_workspace(tmp_path / "again", TEXT)
    versions.fetch(made, workspace / "outputs/preprocess")
    validate(workspace)
    with pytest.raises(UserError, match="small@1, which is a version already"):
        make(workspace)


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("small@2", "small has no version 2; it has 1"),
        ("small@0", "small has no version 0; it has 1"),
        ("smal", "did you mean small?"),
        ("quite-other", "there are small"),
        ("Small@1", "is no dataset version: write name@N"),
        ("small@newest", "is no dataset version"),
        ("../small@1", "is no dataset version"),
        ("small..x@1", "is no dataset version"),
        ("-x@1", "is no dataset version"),
    ],
)
def test_a_wrong_label_is_one_line_that_says_what_there_is(tmp_path, label, line):
    make(make_workspace(tmp_path / "run", TEXT))
    with pytest.raises(UserError) as raised:
        versions.find(label)
    assert line in str(raised.value)


def test_no_version_at_all_is_an_empty_list_and_one_line():
    assert versions.list_versions() == []
    assert versions.newest("small") is None
    with pytest.raises(UserError, match="there is none yet"):
        versions.find("small")


@pytest.mark.parametrize("name", ["Small", "a b", "a/b", ".a", "a..b", "a.", "a@1", ""])
def test_a_bad_name_in_a_recipe_is_one_line(tmp_path, name):
    with pytest.raises(UserError, match=r"data\.name"):
        make_workspace(tmp_path / "run", TEXT, f"data.name='{name}'")


def test_a_recipe_without_a_name_for_its_data_gives_its_own(tmp_path):
    made = make(make_workspace(tmp_path / "run", TEXT, "data.name=null", "name=My-Recipe"))
    assert made.label == "my-recipe@1"
    with pytest.raises(UserError, match=r"set data\.name"):
        make(make_workspace(tmp_path / "next", TEXT, "data.name=null", "name=odd."))


def test_tags_of_other_kinds_are_no_versions(tmp_path, home):
    made = make(make_workspace(tmp_path / "run", TEXT))
    repository = home / "datasets.git"
    for tag in ("small@2", "v1.0", "Small@3", "small@04"):  # the first is not annotated
        git("-C", repository, "tag", tag, "small@1^{commit}")
    assert versions.list_versions() == [made]
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    git("-C", repository, *identity, "tag", "-a", "-m", "x", "other@1", "small@1^{commit}")
    with pytest.raises(UserError, match="the tag other@1 is no dataset version"):
        versions.list_versions()


# Many makers, and killed ones.


def _make(workspace: Path, queue) -> None:
    queue.put(make(workspace).label)


@pytest.mark.parametrize("remote", [False, True])
def test_ten_makers_at_once_give_ten_consecutive_versions(tmp_path, home, monkeypatch, remote):
    if remote:  # a URL: each process pushes to it from the mirror
        git("init", "--quiet", "--bare", "--initial-branch=main", tmp_path / "central.git")
        monkeypatch.setenv("PENSTOCK_DATASETS_URL", (tmp_path / "central.git").as_uri())
    workspaces = [make_workspace(tmp_path / f"run-{n}", TEXT + f"{n}\n") for n in range(10)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    makers = [context.Process(target=_make, args=(each, queue)) for each in workspaces]
    for maker in makers:
        maker.start()
    labels = [queue.get(timeout=120) for _ in makers]
    for maker in makers:
        maker.join()
    assert set(labels) == {f"small@{n}" for n in range(1, 11)}
    made = versions.list_versions("small")
    assert [each.version for each in made] == list(range(1, 11))
    assert {each.run["dag_run_id"] for each in made} == {each.name for each in workspaces}
    assert all(not list(versions.verify(each)) for each in made)


def test_makers_of_the_same_content_at_once_make_one_version(tmp_path):
    workspaces = [make_workspace(tmp_path / f"run-{n}", TEXT) for n in range(4)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    makers = [context.Process(target=_make, args=(each, queue)) for each in workspaces]
    for maker in makers:
        maker.start()
    assert {queue.get(timeout=120) for _ in makers} == {"small@1"}
    for maker in makers:
        maker.join()
    assert len(versions.list_versions()) == 1


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _make_and_die(workspace: Path, owner: object, step: str, after: bool) -> None:
    real = getattr(owner, step)

    def killed(*arguments, **options):
        if after:
            real(*arguments, **options)
        _die()

    setattr(owner, step, killed)
    make(workspace)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (dataset_publishing, "hash_folder"),
        (dvc_objects.ObjectStore, "push"),
        (repository.DatasetRepository, "_make"),
        (repository.DatasetRepository, "_commit"),
        (repository.DatasetRepository, "_push"),
    ],
    ids=["hash", "push-objects", "make-repository", "commit", "push-refs"],
)
def test_a_killed_maker_leaves_a_whole_version_or_none(tmp_path, owner, step, after):
    workspace = make_workspace(tmp_path / "run", TEXT)
    child = multiprocessing.get_context("fork").Process(
        target=_make_and_die, args=(workspace, owner, step, after)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    whole = step == "_push" and after
    made = versions.list_versions()
    assert [each.label for each in made] == (["small@1"] if whole else [])
    assert all(not list(versions.verify(each)) for each in made)
    # The next try makes it, or finds it.
    assert make(workspace).label == "small@1"
    assert list(versions.verify(versions.find("small@1"))) == []


def test_a_maker_killed_between_its_objects_makes_no_version(tmp_path, home, monkeypatch):
    from dvc_objects.fs.local import FsspecLocalFileSystem

    workspace = make_workspace(tmp_path / "run", TEXT)
    real, copied = FsspecLocalFileSystem.put_file, []

    def put_two(*arguments, **options):
        if len(copied) == 2:
            _die()
        copied.append(real(*arguments, **options))

    def body():
        FsspecLocalFileSystem.put_file = put_two
        make(workspace)

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(store_objects(home)) == 2
    assert versions.list_versions() == []
    assert list(versions.verify(make(workspace))) == []


# The repository elsewhere.


def test_versions_in_a_repository_at_a_url(tmp_path, home, monkeypatch):
    central = tmp_path / "central.git"
    git("init", "--quiet", "--bare", "--initial-branch=main", central)
    monkeypatch.setenv("PENSTOCK_DATASETS_URL", central.as_uri())
    made = make(make_workspace(tmp_path / "run", TEXT))
    assert git("-C", central, "tag") == "small@1"
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "another home"))
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(home / "dataset-store"))
    assert versions.find("small") == made
    git("-C", central, "update-ref", "-d", "refs/tags/small@1")
    assert versions.list_versions() == []


def test_a_repository_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_URL", (tmp_path / "none.git").as_uri())
    monkeypatch.setattr(repository, "_NETWORK_TRIES", 1)
    with pytest.raises(UserError, match="PENSTOCK_DATASETS_URL"):
        versions.list_versions()


@pytest.mark.parametrize("user", ["me:s3cret", "s3cret"], ids=["password", "token"])
def test_a_password_in_the_url_is_refused_and_not_shown(monkeypatch, user):
    monkeypatch.setenv("PENSTOCK_DATASETS_URL", f"https://{user}@example.invalid/x.git")
    with pytest.raises(UserError, match="credential helper") as raised:
        versions.list_versions()
    assert "s3cret" not in str(raised.value)


def test_a_remote_of_no_known_kind_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", "ftp://example.invalid/x")
    with pytest.raises(UserError, match="PENSTOCK_DATASETS_REMOTE"):
        make(make_workspace(tmp_path / "run", TEXT))


def test_a_git_hooks_variables_lead_nowhere(tmp_path, home, monkeypatch):
    git("init", "--quiet", tmp_path / "project")
    before = sorted((tmp_path / "project/.git").rglob("*"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "project/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "project/.git/index"))
    make(make_workspace(tmp_path / "run", TEXT))
    monkeypatch.delenv("GIT_DIR")
    assert sorted((tmp_path / "project/.git").rglob("*")) == before
    assert git("-C", home / "datasets.git", "tag") == "small@1"


def test_settings_name_the_default_places(home):
    settings = load_settings()
    assert settings.datasets_url == str(home / "datasets.git")
    assert settings.datasets_remote == str(home / "dataset-store")

"""The stage cache on a small project of its own, with the real git and DVC."""

from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.workspace import Run, read_recipe, workspace_path
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import open_workspace, project_state
from tests.faults.small_disk import small_disk
from tests.unit.stage_cache.cached_project import git, make_project, open_run, run_stage


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def test_another_clone_restores_what_one_committed(project):
    first = open_run(project, "one")
    assert not run_stage(first, "first")
    assert not run_stage(first, "second")

    second = open_run(project, "two")
    assert run_stage(second, "first")
    assert run_stage(second, "second")
    assert (second / "outputs/first/deep/data.bin").read_text() == "result" * 1000
    assert (second / "dvc.lock").read_text() == (first / "dvc.lock").read_text()


@pytest.mark.parametrize(
    ("change", "rerun"),
    [
        ({"source": "b"}, ["first"]),
        ({"overrides": ["seed=1"]}, ["first"]),
        ({"overrides": ["data.sequence_length=32"]}, ["first"]),
        ({"overrides": ["train.steps=3"]}, ["second"]),
        ({"overrides": ["register.model_name=other"]}, []),
        ({"code": "print(2)\n"}, ["first"]),
        ({"lock": "torch==2.13.1\n"}, ["first"]),
    ],
)
def test_a_change_reruns_exactly_the_stages_that_read_it(project, change, rerun):
    before = open_run(project, "before")
    for stage in ("first", "second"):
        run_stage(before, stage)
    if "code" in change:
        (project / "first.py").write_text(change["code"])
    if "lock" in change:
        (project / "requirements.lock").write_text(change["lock"])

    after = open_run(
        project, "after", *change.get("overrides", []), source=change.get("source", "a")
    )
    # An output that comes out the same leaves the later stages cached.
    assert [stage for stage in ("first", "second") if not run_stage(after, stage)] == rerun


def test_workspaces_may_lie_on_another_disk_than_the_project(project, tmp_path):
    with small_disk(tmp_path / "home", 64):
        workspace = open_run(project, "one")
        assert (workspace / "first.py").read_text() == (project / "first.py").read_text()


def test_a_lock_of_an_earlier_try_is_no_hit(project):
    workspace = open_run(project, "one")
    run_stage(workspace, "first")
    (workspace / "source.json").write_text('{"content": "changed"}')
    assert not dvc_cache.restore(workspace, "first")


def test_an_always_changed_stage_is_never_restored(project):
    workspace = open_run(project, "one")
    for stage in ("first", "second", "last"):
        run_stage(workspace, stage)
    again = open_run(project, "two")
    assert [run_stage(again, stage) for stage in ("first", "second", "last")] == [True, True, False]


@pytest.mark.parametrize("victim", ["file", "listing"])
def test_a_corrupt_object_is_quarantined_and_rebuilt(project, victim, caplog):
    run_stage(open_run(project, "one"), "first")
    cache = project.parent / "home/dvc-cache"
    objects = [path for path in cache.glob("files/md5/*/*") if path.is_file()]
    name = {"file": lambda p: not p.name.endswith(".dir") and p.stat().st_size > 100,
            "listing": lambda p: p.name.endswith(".dir")}[victim]  # fmt: skip
    (bad,) = filter(name, objects)
    bad.chmod(0o644)
    bad.write_bytes(bad.read_bytes().replace(b"r", b"x", 1))

    second = open_run(project, "two")
    assert not run_stage(second, "first")
    oid = bad.parent.name + bad.name
    assert oid in caplog.text
    assert (cache / "quarantine" / oid).exists()
    third = open_run(project, "three")
    assert run_stage(third, "first")
    assert (third / "outputs/first/deep/data.bin").read_text() == "result" * 1000


def test_a_torn_entry_costs_a_rerun_and_is_written_anew(project):
    run_stage(open_run(project, "one"), "first")
    (entry,) = (project.parent / "home/dvc-cache").glob("runs/*/*/*")
    entry.write_text("outs: [")
    assert not dvc_cache.restore(open_run(project, "two"), "first")
    assert not run_stage(open_run(project, "three"), "first")
    assert run_stage(open_run(project, "four"), "first")


def test_changing_a_restored_file_leaves_the_cache_alone(project):
    run_stage(open_run(project, "one"), "first")
    second = open_run(project, "two")
    run_stage(second, "first")
    restored = second / "outputs/first/deep/data.bin"
    restored.chmod(0o644)
    restored.write_text("mine now")
    assert run_stage(open_run(project, "three"), "first")


def test_a_dirty_tree_runs_as_it_is_and_says_so(project):
    (project / "first.py").write_text("print('changed')\n")
    workspace = open_run(project, "one")
    assert (workspace / "first.py").read_text() == "print('changed')\n"
    assert "print('changed')" in (workspace / "uncommitted.diff").read_text()
    assert Run.read(workspace).dirty
    git(project, "checkout", "--quiet", "first.py")
    assert not Run.read(open_run(project, "two")).dirty


def test_a_recipe_that_git_does_not_know_is_part_of_the_diff(project):
    recipes = project / "recipes"
    recipes.mkdir()
    (project / ".gitignore").write_text("/outputs/\n/recipes/ignored.yaml\n")
    git(project, "commit", "--quiet", "--all", "--message", "ignore one")
    (recipes / "ignored.yaml").touch()
    (project / "notes.txt").write_text("no recipe\n")
    assert not Run.read(open_run(project, "clean")).dirty
    texts = {"new.yaml": "name: new\n", "caf\xe9 2.yaml": "seed: 1", "empty.yaml": ""}
    for name, text in texts.items():
        (recipes / name).write_text(text)
    git(project, "config", "diff.noprefix", "true")
    (project / "first.py").write_text("print('changed')\n")
    state = project_state(project)
    workspace = open_run(project, "new")
    assert Run.read(workspace).dirty
    assert {path.name: path.read_text() for path in (workspace / "recipes").iterdir()} == texts
    for name in texts:
        (recipes / name).unlink()
    git(project, "checkout", "--quiet", "first.py")
    recipe, home = load_recipe("debug"), project.parent / "home"
    again = open_workspace(project, home, "again", recipe, {}, state=state)
    assert {path.name: path.read_text() for path in (again / "recipes").iterdir()} == texts
    assert (again / "first.py").read_text() == "print('changed')\n"


def test_a_dirty_tree_of_any_bytes_runs_whatever_git_is_configured_to_print(project):
    (project / "windows.txt").write_bytes(b"one\r\ntwo\r\n")
    (project / "latin.txt").write_bytes(b"caf\xe9\n")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "odd bytes")
    for setting in ("diff.noprefix=true", "color.ui=always"):
        git(project, "config", *setting.split("="))
    (project / "windows.txt").write_bytes(b"one\r\n2\r\n")
    (project / "latin.txt").write_bytes(b"th\xe9\n")
    workspace = open_run(project, "one")
    assert (workspace / "windows.txt").read_bytes() == b"one\r\n2\r\n"
    assert (workspace / "latin.txt").read_bytes() == b"th\xe9\n"


def test_a_run_leaves_nothing_beside_its_workspace(project):
    workspace = open_run(project, "one")
    run_stage(workspace, "first")
    assert [path.name for path in workspace.parent.iterdir()] == ["one"]


def test_a_second_opening_finds_the_same_workspace(project):
    first = open_run(project, "manual__2026-01-01T00:00:00+00:00")
    (first / "kept").touch()
    again = open_run(project, "manual__2026-01-01T00:00:00+00:00", "seed=9")
    assert again == first
    assert (again / "kept").exists()
    assert ":" not in again.name
    assert read_recipe(again).seed == load_recipe("debug").seed


@pytest.mark.parametrize("run_id", [".", "..", "...", "x" * 250])
def test_no_run_id_leads_out_of_the_runs_folder(tmp_path, run_id):
    path = workspace_path(tmp_path, run_id)
    assert path.parent == tmp_path
    assert path.resolve() == path
    assert len(path.name) < 120


def test_run_ids_that_differ_only_in_odd_characters_differ_in_folder(tmp_path):
    assert workspace_path(tmp_path, "a:b") != workspace_path(tmp_path, "a+b")


def test_outside_git_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="git init"):
        open_workspace(tmp_path, tmp_path / "home", "x", load_recipe("debug"), {})
    assert not list((tmp_path / "home/runs").glob("*"))


def test_the_environment_names_what_decides_a_result(project):
    values = read_json(open_run(project, "one") / "environment.json")
    files = {"lock", "init_from", "adapter", "bias_templates", "tasks", "extensions"}
    assert set(values) == {*files, "python", "machine", "device", "world_size"}

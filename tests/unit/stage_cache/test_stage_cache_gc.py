"""What the stage cache forgets, with the real DVC."""

import os
import time
from pathlib import Path

import pytest

from pipelines.core.storage import md5
from pipelines.stage_cache import dvc_cache
from tests.unit.stage_cache.cached_project import make_project, open_run, run_stage

OLD = 30 * 86_400.0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture
def cache(project: Path) -> Path:
    return project.parent / "home/dvc-cache"


def age(cache: Path) -> None:
    """As if all that is there had been made a month ago."""
    for path in cache.rglob("*"):
        os.utime(path, (time.time() - OLD,) * 2)


def forget(cache: Path, *kept: Path) -> int:
    return dvc_cache.forget(cache, kept, time.time() - OLD / 2)


def files(cache: Path) -> list[Path]:
    return [path for folder in ("files", "runs") for path in (cache / folder).rglob("*.*")]


def test_young_results_stay(project, cache):
    run_stage(open_run(project, "one"), "first")
    assert forget(cache) == 0
    assert run_stage(open_run(project, "two"), "first")


def test_old_results_go_but_what_a_kept_workspace_holds(project, cache):
    kept, other = open_run(project, "kept"), open_run(project, "other", "seed=1")
    for workspace, content in ((kept, "result"), (other, "another")):
        assert not run_stage(workspace, "first", content)
    age(cache)
    before = {path for path in cache.rglob("*") if path.is_file() and "locks" not in path.parts}
    unneeded = dvc_cache.unneeded(cache, [kept], time.time() - OLD / 2)
    size = sum(path.stat().st_size for path in unneeded)
    assert forget(cache, kept) == size > len("another") * 1000
    left = {path for path in cache.rglob("*") if path.is_file() and "locks" not in path.parts}
    assert before - left == set(unneeded)

    assert run_stage(open_run(project, "again"), "first")
    assert not run_stage(open_run(project, "other again", "seed=1"), "first", "another")


def test_a_young_result_keeps_the_old_objects_that_it_shares(project, cache):
    first = open_run(project, "one")
    run_stage(first, "first")
    run_stage(first, "second")
    age(cache)
    second = open_run(project, "two", "train.steps=3")
    run_stage(second, "first")
    assert not run_stage(second, "second", "fresh")  # and the same record
    assert forget(cache) > 0
    for path in cache.glob("files/md5/*/*"):
        assert md5(path) == (path.parent.name + path.name).removesuffix(".dir")
    third = open_run(project, "three", "train.steps=3")
    assert [run_stage(third, stage) for stage in ("first", "second")] == [False, True]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(".torn.tmp", "outs: [", id="a killed writer"),
        pytest.param("emptied", "", id="a power cut"),
    ],
)
def test_a_torn_entry_goes_once_it_is_old(project, cache, name, content):
    run_stage(open_run(project, "one"), "first")
    (entry,) = cache.glob("runs/*/*/*")
    torn = entry.with_name(name)
    torn.write_text(content)
    assert forget(cache) == 0
    age(cache)
    forget(cache)
    assert not torn.exists()

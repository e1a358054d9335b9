"""Many runs at once on one stage cache: real processes, started together."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from pipelines.core.storage import md5
from pipelines.stage_cache import dvc_cache
from tests.forked import forkserver
from tests.unit.stage_cache.cached_project import make_project, open_run, run_stage

RUNS = 5
_barrier = None


def _set_up(barrier) -> None:
    global _barrier
    _barrier = barrier


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    context = forkserver()
    with ProcessPoolExecutor(
        RUNS, context, initializer=_set_up, initargs=(context.Barrier(RUNS),)
    ) as pool:
        yield pool


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def sound(cache: Path) -> bool:
    """Whether each object is what its name says, and nobody left anything half-written."""
    objects = list(cache.glob("files/md5/*/*"))
    names = [(path.parent.name + path.name).removesuffix(".dir") for path in objects]
    return [md5(path) for path in objects] == names and not list(cache.rglob("*.tmp"))


def both_stages(project: Path, name: str, *overrides: str) -> tuple[bool, bool]:
    workspace = open_run(project, name, *overrides)
    _barrier.wait(60)
    return run_stage(workspace, "first"), run_stage(workspace, "second", name)


def content(project: Path, name: str, stage: str) -> str:
    return (project.parent / "home/runs" / name / f"outputs/{stage}/deep/data.bin").read_text()


def test_the_same_stages_in_all_runs_at_once(processes, project):
    names = [f"same-{number}" for number in range(RUNS)]
    list(processes.map(both_stages, [project] * RUNS, names))
    assert sound(project.parent / "home/dvc-cache")
    for name in names:
        assert content(project, name, "first") == "result" * 1000
    # Whoever comes later finds a result; all the same one, of whichever run was last.
    late = [open_run(project, f"late-{number}") for number in range(2)]
    assert all(run_stage(workspace, stage) for workspace in late for stage in ("first", "second"))
    assert content(project, "late-0", "second") == content(project, "late-1", "second")


def test_different_stages_at_once(processes, project):
    names = [f"run-{number}" for number in range(RUNS)]
    seeds = [f"seed={number}" for number in range(RUNS)]
    cached = list(processes.map(both_stages, [project] * RUNS, names, seeds))
    assert [first for first, _ in cached] == [False] * RUNS
    assert sound(project.parent / "home/dvc-cache")
    for number, name in enumerate(names):
        again = open_run(project, f"again-{number}", f"seed={number}")
        assert run_stage(again, "first")
        assert content(project, name, "first") == "result" * 1000


def restore_often(project: Path, name: str) -> list[bool]:
    workspace = open_run(project, name)
    _barrier.wait(60)
    return [dvc_cache.restore(workspace, "first") for _ in range(5)]


def commit_often(project: Path, name: str) -> list[bool]:
    workspace = open_run(project, name)
    _barrier.wait(60)
    for number in range(5):
        (workspace / "outputs/first/deep").mkdir(parents=True, exist_ok=True)
        (workspace / "outputs/first/deep/data.bin").write_text(f"{name} {number}")
        (workspace / "outputs/first/record.json").write_text("{}")
        dvc_cache.commit(workspace, "first")
    return []


def forget_often(project: Path, _: str) -> list[bool]:
    _barrier.wait(60)
    cache = project.parent / "home/dvc-cache"
    for _ in range(20):
        dvc_cache.forget(cache, [], older_than=float("inf"))  # everything is old
    return []


def act(work: tuple) -> list[bool]:
    function, *arguments = work
    return function(*arguments)


def test_commits_and_restores_of_one_stage_never_miss(processes, project):
    run_stage(open_run(project, "first-of-all"), "first")
    work = [(commit_often, project, f"writer-{number}") for number in range(2)]
    work += [(restore_often, project, f"reader-{number}") for number in range(RUNS - 2)]
    restored = [hit for hits in processes.map(act, work) for hit in hits]
    assert restored == [True] * 5 * (RUNS - 2)
    assert sound(project.parent / "home/dvc-cache")


def test_forgetting_everything_meanwhile_costs_a_rerun_and_no_error(processes, project):
    run_stage(open_run(project, "first-of-all"), "first")
    work = [(commit_often, project, f"writer-{number}") for number in range(2)]
    work += [(restore_often, project, f"reader-{number}") for number in range(RUNS - 3)]
    work += [(forget_often, project, "gc")]
    list(processes.map(act, work))
    assert sound(project.parent / "home/dvc-cache")

"""A month of nightly runs, each night followed by the real collection: the disk's peak is bounded.

A day passes as every file of the home gets a day older. Each day has a run with checkpoints and new
results in the stage cache; every third fails. Every fourth day one is killed as it is being made.
"""

import os
from pathlib import Path

import pytest
import yaml

from pipelines.core.settings import load_settings
from pipelines.core.storage import folder_bytes, read_json, write_json
from pipelines.platform.garbage_collection import DAY, Rules
from pipelines.run.records import KEPT_FILE
from pipelines.stage_cache import dvc_cache
from tests.unit.platform.test_garbage import Airflow, collect, make_run
from tests.unit.stage_cache.cached_project import make_project, run_stage

DAYS = 30
CHECKPOINT = 50_000  # bytes, of which each run has two
RULES = Rules()


def pass_a_day(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        changed = path.lstat().st_mtime - DAY
        os.utime(path, (changed, changed), follow_symlinks=False)


def make_day(project: Path, name: str) -> Path:
    """A run of today, which computed something that no run before it had."""
    workspace = make_run(project, name, days=0, source=name)
    for path in workspace.glob("checkpoints/*/*.distcp"):
        path.write_bytes(b"x" * CHECKPOINT)
    run_stage(workspace, "first", content=name)
    return workspace


def content(folder: Path) -> dict[Path, bytes]:
    """All that a run could still read there."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".stage.lock"]
    return {path: path.read_bytes() for path in files}


@pytest.mark.long
def test_a_month_of_runs_and_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, home = make_project(tmp_path), tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    settings, airflow = load_settings(), Airflow({})
    champion = make_day(project, "champion")
    airflow.states["champion"] = "success"
    size = folder_bytes(champion) + 5000  # and its result in the cache
    # It waits for its node all the month, and keeps a result that only the cache still has.
    source = make_day(project, "source")
    airflow.states |= {"source": "failed", "waits": "running"}
    waits = make_day(project, "waits")
    entry = yaml.safe_load((source / "dvc.lock").read_text())["stages"]["first"]
    write_json(waits / KEPT_FILE, {"first": {"entry": entry, "run": "source"}})
    needed = {folder: content(folder) for folder in (champion, waits)}
    peaks, made = [], 3
    for day in range(DAYS):
        name = f"night-{day:02d}"
        make_day(project, name)
        made += 1
        airflow.states[name] = "failed" if day % 3 == 2 else "success"
        if day % 4 == 0:
            (home / "runs" / f".killed-{day}.x").mkdir()
            (home / "runs" / f".killed-{day}.x" / "half.pack").write_bytes(b"x" * CHECKPOINT)
        peaks.append(folder_bytes(home))
        collect(settings, airflow, rules=RULES, aliased={"hash of champion"})
        for folder, files in needed.items():
            assert content(folder) == files
        pass_a_day(home)
    dvc_cache._restore_kept(waits, "first", read_json(waits / KEPT_FILE)["first"])
    assert (waits / "outputs/first/deep/data.bin").read_text().startswith("source")
    # Whole are today's and those of two days, the last that failed, one that was killed, and the
    # two that are needed; without checkpoints, at most one for each of 14 days.
    whole = 1 + RULES.checkpoint_days + 1 + 1 + 2
    assert max(peaks) <= whole * size + RULES.days * (size - 2 * CHECKPOINT)
    assert max(peaks[21:]) <= 1.01 * max(peaks[:21])
    assert made * size > 2 * max(peaks)

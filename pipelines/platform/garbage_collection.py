"""`penstock gc`: find and delete what old runs left; the rules are the ledger's `retention`.

A workspace is removed in two steps: it is renamed into the trash under the lock that its stages
hold, and deleted after Airflow has said again that its run is not live. So no workspace is ever
half removed, and a run that a user cleared in the meantime gets its workspace back.

`decide` alone holds the rules: which files of a run are kept, and for how long.
"""

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UnreachableError
from pipelines.core.settings import COLLECTION_LOCK, Settings
from pipelines.core.storage import (
    alone_or_refused,
    folder_bytes,
    one_at_a_time,
    read_json,
)
from pipelines.platform.airflow_api import AirflowApi, DagRun
from pipelines.registry import registry
from pipelines.run.records import REFERENCES, RUN_FILE, TrainRecord, record_path
from pipelines.run.workspace import workspace_path
from pipelines.serving.serving_engine import SERVING, leftovers
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import STAGE_CACHE
from pipelines.stages.stage_process import STAGE_LOCK
from pipelines.tracking.tracked_run import MODEL_HASH_TAG, TRAINED_HASH_TAG
from pipelines.training.checkpoint.store import CheckpointStore, place_of_run

State = Literal["live", "succeeded", "failed"]
DAY = 86_400.0  # seconds
SETTLES = 3600.0  # seconds during which a changed file is kept, whatever the rules say


@dataclass(frozen=True)
class Rules:
    """Age limits in days since a run last wrote a file."""

    days: float = 14  # workspaces of runs that succeeded, and results in the stage cache
    failed_days: float = 3  # workspaces of runs that failed
    checkpoint_days: float = 2  # checkpoints of runs that succeeded: the model is exported
    keep_last: int = 3  # newest successful runs of each recipe that are always kept


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that the rules need."""

    name: str  # its workspace's name
    recipe: str
    state: State
    changed: float  # seconds since the epoch
    model_hash: str | None = None  # its model, trained or from the cache


@dataclass(frozen=True)
class Decision:
    """A part of one run that may be deleted, and why."""

    run: RunFacts
    what: Literal["workspace", "checkpoints"]
    why: str


def decide(
    runs: Iterable[RunFacts], rules: Rules, aliased: Collection[str], now: float
) -> Iterator[Decision]:
    """Yield what may be deleted; a run without a decision is kept whole.

    Args:
        runs: Every run.
        rules: The age limits and numbers.
        aliased: Content hashes of the registered models that an alias names, such as champions;
            the runs that trained them keep their workspaces and checkpoints.
        now: Seconds since the epoch.
    """
    families: dict[str, list[RunFacts]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.changed, reverse=True):
        families[run.recipe].append(run)
    for family in families.values():
        succeeded = [run.name for run in family if run.state == "succeeded"]
        last = succeeded[: rules.keep_last]
        for run in family:
            age = now - run.changed
            if run.state == "live" or run.model_hash in aliased or age < SETTLES:
                continue
            decision = _of(run, rules, age / DAY, is_last=run.name in last)
            if decision is not None:
                yield decision


def _of(run: RunFacts, rules: Rules, days: float, *, is_last: bool) -> Decision | None:
    if run.state == "failed":
        old = days >= rules.failed_days
        return Decision(run, "workspace", f"failed {_ago(days)}") if old else None
    if days >= rules.days and not is_last:
        return Decision(run, "workspace", f"succeeded {_ago(days)}")
    if days >= rules.checkpoint_days:
        return Decision(run, "checkpoints", f"its model was exported {_ago(days)}")
    return None


def _ago(days: float) -> str:
    return f"{days:.0f} days ago" if days >= 2 else f"{days * 24:.0f} hours ago"


TRASH = ".trash"  # beside the workspaces: no run's name begins with a dot
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Garbage:
    """Something that may be deleted or was deleted."""

    what: Literal["workspace", "checkpoints", "stage cache", "reference", "serving", "trash"]
    name: str
    bytes: int
    why: str


def collect(
    settings: Settings, airflow: AirflowApi, rules: Rules, aliased: Collection[str], *, delete: bool
) -> Iterator[Garbage]:
    """Yield what may be deleted; with `delete`, delete each and yield it.

    Args:
        settings: They name the folder of the runs.
        airflow: The client that says which runs are live.
        rules: The rules of what is kept.
        aliased: Content hashes of the registered models that an alias names.
        delete: Whether to delete; otherwise no file is changed.

    Raises:
        UserError: Another `penstock gc` or a backup is at work.
    """
    refusal = "another `penstock gc` or a `penstock backup` is at work; wait until it ends"
    with alone_or_refused(settings.home / COLLECTION_LOCK, refusal):
        for path in sorted(settings.runs.glob(f"{TRASH}/*")):
            size = folder_bytes(path)
            if delete:
                _delete(path)
            yield Garbage("trash", path.name, size, "an earlier call was cut off")
        states = _states(airflow.runs())
        yield from _not_begun(settings, states, rules, delete=delete)
        runs = list(_runs(settings, states))
        gone: set[Path] = set()
        for each in decide(runs, rules, aliased, time.time()):
            path = settings.runs / each.run.name
            try:
                size = _bytes(path, each.what)
                if delete and not _REMOVE[each.what](path, airflow):
                    continue  # its run is live again
            except UnreachableError as error:
                _log.warning("%s is kept: %s", path, error)
                continue
            if each.what == "workspace":
                gone.add(path)
            if size:
                yield Garbage(each.what, path.name, size, each.why)
        yield from _stage_cache(settings, rules, gone, delete=delete)
        yield from _references(settings, rules, delete=delete)
        yield from _serving(settings, delete=delete)


def aliased_models() -> set[str]:
    """Return the content hashes of the registered models that any alias names."""
    names = [model.name for model in registry.list_models()]
    versions = (version for name in names for version in registry.show(name))
    tags = (version.tags for version in versions if version.aliases)
    return {each[tag] for each in tags for tag in (MODEL_HASH_TAG, TRAINED_HASH_TAG) if tag in each}


def _runs(settings: Settings, states: dict[str, State]) -> Iterator[RunFacts]:
    """Yield every run with a complete workspace."""
    for path in _workspaces(settings):
        record = record_path(path, TrainRecord.stage)
        trained = record.is_file()
        try:
            with _no_stage_runs(path):
                state = _state(path, states, "succeeded" if trained else "failed")
        except BlockingIOError:
            state = "live"
        yield RunFacts(
            name=path.name,
            recipe=_params(path).get("name", ""),
            state=state,
            changed=_changed(path),
            model_hash=read_json(record)["model_hash"] if trained else None,
        )


def _workspaces(settings: Settings) -> Iterator[Path]:
    """Yield the complete workspaces; a new one has no `run.json` yet."""
    yield from sorted(path.parent for path in settings.runs.glob(f"[!.]*/{RUN_FILE}"))


def _not_begun(
    settings: Settings, states: dict[str, State], rules: Rules, *, delete: bool
) -> Iterator[Garbage]:
    """Yield what is left of runs that could not begin: half a clone, or a file with the error."""
    live = {
        workspace_path(settings.runs, name) for name, state in states.items() if state == "live"
    }
    for path in sorted(settings.runs.glob("*/")):
        if path.name in (TRASH, REFERENCES) or (path / RUN_FILE).is_file() or path in live:
            continue
        days = (time.time() - _changed(path)) / DAY
        if days >= max(rules.failed_days, SETTLES / DAY):
            size = folder_bytes(path)
            if delete:
                shutil.rmtree(path)
            yield Garbage("workspace", path.name, size, f"its run could not begin {_ago(days)}")


def _changed(folder: Path) -> float:
    """Return when a folder or a file directly in it changed last, seconds since the epoch."""
    files = [each for each in folder.iterdir() if each.name != STAGE_LOCK]
    return max(each.lstat().st_mtime for each in files or [folder])


def _states(runs: Iterable[DagRun]) -> dict[str, State]:
    """Map both possible names of a run's workspace to its state; two DAGs may share an id."""
    states: dict[str, State] = {}
    for run in runs:
        for name in (run.run_id, f"{run.dag_id}__{run.run_id}"):
            if run.live:
                states[name] = "live"
            else:
                states.setdefault(name, "succeeded" if run.state == "success" else "failed")
    return states


def _state(workspace: Path, states: dict[str, State], otherwise: State) -> State:
    """Return Airflow's state of a run, or `otherwise` for ad hoc jobs and `penstock stage`."""
    run_id: str = read_json(workspace / RUN_FILE)["dag_run_id"]
    # A run may have several workspaces, whose names contain the run's name.
    if any(state == "live" and name in run_id for name, state in states.items()):
        return "live"
    return states.get(run_id, otherwise)


def _bytes(workspace: Path, what: Literal["workspace", "checkpoints"]) -> int:
    """Return the bytes of a workspace with all its checkpoints, or of its checkpoints alone."""
    places = _checkpoints(workspace)
    if what == "checkpoints":
        return sum(CheckpointStore(place).bytes() for place in places)
    elsewhere = [place for place in places if not _is_in(place, workspace)]
    return folder_bytes(workspace) + sum(CheckpointStore(place).bytes() for place in elsewhere)


def _remove_workspace(workspace: Path, airflow: AirflowApi) -> bool:
    """Remove a workspace unless its run is live again; return whether it was removed."""
    try:
        with _no_stage_runs(workspace):
            trash = workspace.parent / TRASH / workspace.name
            trash.parent.mkdir(exist_ok=True)
            workspace.rename(trash)
            if _state(trash, _states(airflow.runs(live=True)), "failed") == "live":
                trash.rename(workspace)
                return False
            _delete(trash)
            return True
    except BlockingIOError:
        return False


def _delete(trash: Path) -> None:
    """Delete checkpoints elsewhere first, because only the workspace names their places."""
    for place in _checkpoints(trash):
        if not _is_in(place, trash):
            _clear(place)
    shutil.rmtree(trash)
    with suppress(OSError):  # the trash holds other workspaces
        trash.parent.rmdir()


def _remove_checkpoints(workspace: Path, _: AirflowApi) -> bool:
    """Remove a run's checkpoints unless one of its stages runs; return whether they are gone."""
    try:
        with _no_stage_runs(workspace):
            for place in _checkpoints(workspace):
                _clear(place)
    except BlockingIOError:
        return False
    return True


_REMOVE = {"workspace": _remove_workspace, "checkpoints": _remove_checkpoints}


def _clear(place: str) -> None:
    """Delete checkpoints so that an interruption leaves no partial one that looks complete."""
    store = CheckpointStore(place)
    for step in store.steps():
        store.remove(step)
    store.clear()


def _stage_cache(
    settings: Settings, rules: Rules, gone: Collection[Path], *, delete: bool
) -> Iterator[Garbage]:
    cache, older_than = settings.home / STAGE_CACHE, time.time() - rules.days * DAY
    # Read when the cache is locked: a run that began since may need what is old.
    kept = (path for path in _workspaces(settings) if path not in gone)
    if delete:
        size = dvc_cache.forget(cache, kept, older_than)
    else:
        paths = dvc_cache.unneeded(cache, kept, older_than)
        size = sum(path.stat().st_size for path in paths)
    if size:
        why = f"no remaining workspace uses it, and it is {rules.days:g} days old"
        yield Garbage("stage cache", cache.name, size, why)


def _references(settings: Settings, rules: Rules, *, delete: bool) -> Iterator[Garbage]:
    """Yield what no run has begun with for long; a run that needs it measures it again."""
    for path in sorted(settings.runs.glob(f"{REFERENCES}/*.npy")):
        found = path.stat()
        days = (time.time() - found.st_mtime) / DAY
        if days >= max(rules.days, SETTLES / DAY):
            if delete:
                path.unlink()
            yield Garbage("reference", path.name, found.st_size, f"a run used it {_ago(days)}")


def _serving(settings: Settings, *, delete: bool) -> Iterator[Garbage]:
    for place in leftovers(settings.home / SERVING, time.time() - SETTLES):
        size = folder_bytes(place)
        if delete:
            shutil.rmtree(place)
        yield Garbage("serving", place.name, size, "its server was killed")


def _checkpoints(workspace: Path) -> list[str]:
    """Return the places of a run's checkpoints by its raw recipe, which may no longer be valid."""
    train = _params(workspace).get("train", {})
    further = [more["place"] for more in train.get("more_checkpoints") or []]
    return [place_of_run(place, workspace) for place in (train.get("checkpoints"), *further)]


def _params(workspace: Path) -> dict[str, Any]:
    path = workspace / "params.yaml"
    params: dict[str, Any] = read_yaml(path) if path.is_file() else {}
    return params


def _is_in(place: str, folder: Path) -> bool:
    return Path(place).is_relative_to(folder)


def _no_stage_runs(workspace: Path) -> AbstractContextManager[None]:
    """Hold the lock that a running stage holds; raise BlockingIOError if a stage runs."""
    return one_at_a_time(workspace / STAGE_LOCK, wait=False)

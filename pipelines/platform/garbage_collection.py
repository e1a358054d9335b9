"""`penstock gc`: finds what old runs left, and removes it; the rules are the ledger's `retention`.

A workspace goes in two steps: it is renamed into the trash under the lock that its stages hold, and
deleted once Airflow has said again that its run does not live. So nothing is ever half removed, and
a run that was cleared meanwhile gets its workspace back.

What of a run is kept, and for how long: the rules of `penstock gc`, and nothing but them.
"""

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import Settings
from pipelines.core.storage import folder_bytes, one_at_a_time, read_json
from pipelines.platform.airflow_api import AirflowApi, DagRun
from pipelines.registry import registry
from pipelines.run.records import RUN_FILE, TrainRecord, record_path
from pipelines.serving.serving_engine import SERVING, leftovers
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import STAGE_CACHE
from pipelines.stages.stage_process import STAGE_LOCK
from pipelines.tracking.tracked_run import MODEL_HASH_TAG, TRAINED_HASH_TAG
from pipelines.training.checkpoint.store import CheckpointStore, place_of_run

State = Literal["live", "succeeded", "failed"]
DAY = 86_400.0  # seconds
SETTLES = 3600.0  # seconds in which nothing that just changed is touched, whatever the rules say


@dataclass(frozen=True)
class Rules:
    """Ages in days since a run last wrote anything."""

    days: float = 14  # the workspace of a run that succeeded, and a result in the stage cache
    failed_days: float = 3  # the workspace of one that failed
    checkpoint_days: float = 2  # the checkpoints of one that succeeded: its model is exported
    keep_last: int = 3  # so many that succeeded of each recipe are kept, however old


@dataclass(frozen=True)
class RunFacts:
    """A run as far as the rules ask."""

    name: str  # of its workspace
    recipe: str
    state: State
    changed: float  # seconds since the epoch
    model_hash: str | None = None  # of the model that it trained or took from the cache


@dataclass(frozen=True)
class Decision:
    """What may go of one run, and why."""

    run: RunFacts
    what: Literal["workspace", "checkpoints"]
    why: str


def decide(
    runs: Iterable[RunFacts], rules: Rules, aliased: Collection[str], now: float
) -> Iterator[Decision]:
    """What may go; a run that is not named is kept whole.

    Args:
        runs: All there are.
        rules: Ages and numbers.
        aliased: Content hashes of the registered models that an alias names, champions among them;
            whoever trained one keeps workspace and checkpoints.
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


TRASH = ".trash"  # among the workspaces: no run's name begins with a dot
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Garbage:
    """Something that may go, or that went."""

    what: Literal["workspace", "checkpoints", "stage cache", "serving", "trash"]
    name: str
    bytes: int
    why: str


def collect(
    settings: Settings, airflow: AirflowApi, rules: Rules, aliased: Collection[str], *, delete: bool
) -> Iterator[Garbage]:
    """What may go; with `delete` what went, one after the other.

    Args:
        settings: Where the runs are.
        airflow: It says which runs live.
        rules: What is kept.
        aliased: Content hashes of the registered models that an alias names.
        delete: Remove it; else nothing is touched.

    Raises:
        UserError: another call is at work.
    """
    with _alone(settings):
        for path in sorted(settings.runs.glob(f"{TRASH}/*")):
            size = folder_bytes(path)
            if delete:
                _delete(path)
            yield Garbage("trash", path.name, size, "an earlier call was cut off")
        runs = list(_runs(settings, _states(airflow.runs())))
        kept = {settings.runs / run.name for run in runs}
        for each in decide(runs, rules, aliased, time.time()):
            path = settings.runs / each.run.name
            try:
                size = _bytes(path, each.what)
                if delete and not _REMOVE[each.what](path, airflow):
                    continue  # it lives again
            except UnreachableError as error:
                _log.warning("%s stays: %s", path, error)
                continue
            if each.what == "workspace":
                kept.remove(path)
            if size:
                yield Garbage(each.what, path.name, size, each.why)
        yield from _stage_cache(settings, rules, kept, delete=delete)
        yield from _serving(settings, delete=delete)


def aliased_models() -> set[str]:
    """Content hashes of the registered models that any alias names."""
    names = [model.name for model in registry.list_models()]
    versions = (version for name in names for version in registry.show(name))
    tags = (version.tags for version in versions if version.aliases)
    return {each[tag] for each in tags for tag in (MODEL_HASH_TAG, TRAINED_HASH_TAG) if tag in each}


def _runs(settings: Settings, states: dict[str, State]) -> Iterator[RunFacts]:
    """All that have a workspace; one that is just being made has no `run.json` yet."""
    for path in sorted(path.parent for path in settings.runs.glob(f"[!.]*/{RUN_FILE}")):
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
            changed=max(
                each.lstat().st_mtime for each in path.iterdir() if each.name != STAGE_LOCK
            ),
            model_hash=read_json(record)["model_hash"] if trained else None,
        )


def _states(runs: Iterable[DagRun]) -> dict[str, State]:
    """Map both names that a workspace may have to its run's state; two DAGs may share an id."""
    states: dict[str, State] = {}
    for run in runs:
        for name in (run.run_id, f"{run.dag_id}__{run.run_id}"):
            if run.live:
                states[name] = "live"
            else:
                states.setdefault(name, "succeeded" if run.state == "success" else "failed")
    return states


def _state(workspace: Path, states: dict[str, State], otherwise: State) -> State:
    """What Airflow says; it knows no ad hoc job and no `penstock stage`."""
    run_id: str = read_json(workspace / RUN_FILE)["dag_run_id"]
    # A run may have several workspaces, whose names are longer than its own.
    if any(state == "live" and name in run_id for name, state in states.items()):
        return "live"
    return states.get(run_id, otherwise)


def _bytes(workspace: Path, what: Literal["workspace", "checkpoints"]) -> int:
    """Count a whole workspace's bytes with its checkpoints elsewhere, or its checkpoints' alone."""
    place = _checkpoints(workspace)
    if what == "checkpoints":
        return CheckpointStore(place).bytes()
    elsewhere = 0 if _is_in(place, workspace) else CheckpointStore(place).bytes()
    return folder_bytes(workspace) + elsewhere


def _remove_workspace(workspace: Path, airflow: AirflowApi) -> bool:
    """Remove a workspace, unless its run has come to life; whether it is gone."""
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
    """Checkpoints that lie elsewhere go first: only the workspace says where."""
    place = _checkpoints(trash)
    if not _is_in(place, trash):
        _clear(place)
    shutil.rmtree(trash)
    with suppress(OSError):  # there are others
        trash.parent.rmdir()


def _remove_checkpoints(workspace: Path, _: AirflowApi) -> bool:
    """Remove a run's checkpoints, unless one of its stages is at work; whether they are gone."""
    try:
        with _no_stage_runs(workspace):
            _clear(_checkpoints(workspace))
    except BlockingIOError:
        return False
    return True


_REMOVE = {"workspace": _remove_workspace, "checkpoints": _remove_checkpoints}


def _clear(place: str) -> None:
    """One that is cut off leaves no checkpoint that counts and is not whole."""
    store = CheckpointStore(place)
    for step in store.steps():
        store.remove(step)
    store.clear()


def _stage_cache(
    settings: Settings, rules: Rules, kept: Collection[Path], *, delete: bool
) -> Iterator[Garbage]:
    cache, older_than = settings.home / STAGE_CACHE, time.time() - rules.days * DAY
    if delete:
        size = dvc_cache.forget(cache, kept, older_than)
    else:
        paths = dvc_cache.unneeded(cache, kept, older_than)
        size = sum(path.stat().st_size for path in paths)
    if size:
        why = f"no workspace that stays holds it, and it is {rules.days:g} days old"
        yield Garbage("stage cache", cache.name, size, why)


def _serving(settings: Settings, *, delete: bool) -> Iterator[Garbage]:
    for place in leftovers(settings.home / SERVING, time.time() - SETTLES):
        size = folder_bytes(place)
        if delete:
            shutil.rmtree(place)
        yield Garbage("serving", place.name, size, "its server was killed")


def _checkpoints(workspace: Path) -> str:
    """Where a run's checkpoints lie, as its own recipe says, which today's code may not accept."""
    return place_of_run(_params(workspace).get("train", {}).get("checkpoints"), workspace)


def _params(workspace: Path) -> dict[str, Any]:
    path = workspace / "params.yaml"
    params: dict[str, Any] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return params


def _is_in(place: str, folder: Path) -> bool:
    return Path(place).is_relative_to(folder)


def _no_stage_runs(workspace: Path) -> AbstractContextManager[None]:
    """Hold the lock that a stage holds while it runs; raises BlockingIOError where one runs."""
    return one_at_a_time(workspace / STAGE_LOCK, wait=False)


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(one_at_a_time(settings.home / "gc.lock", wait=False))
        except BlockingIOError:
            raise UserError("another `penstock gc` is at work; wait for its end") from None
        yield

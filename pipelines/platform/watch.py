"""Note in the runs' logbooks what happened to the platform and what users decided.

Each live run notes a part that another process replaced. What users cleared and marked comes from
Airflow's own log of users' actions, which gives each decision its identity.

It also notes which recipes have live runs, so that their DAGs stay until these are over.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from pipelines.core.formatting import duration
from pipelines.core.settings import Settings
from pipelines.core.storage import read_json, write_json
from pipelines.orchestration.naming import members, note_live, workspace_name
from pipelines.orchestration.task_liveness import service_lost
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.platform import runtime_folder
from pipelines.platform.supervisor import Supervisor
from pipelines.recipe.schedule_section import MAIN_DAG, REFRESH_DAG
from pipelines.run.logbook import Entry, note
from pipelines.run.records import RUN_FILE
from pipelines.run.workspace import workspace_path

# Each task with a job in Ray reports a lost Ray; a run without a job has lost nothing.
_UNTOLD = ("ray", "reconciler")
CLEARS = ("post_clear_task_instances", "clear_dag_run")
_STAYS_S = 30.0  # by then a part has found that its database is away, and has ended
_SET_S = 60.0  # a clock that gains or loses more between two looks was set
_MARKS = ("patch_task_instance", "patch_task_group_instances", "patch_dag_run")
_BULK_MARKS = "bulk_task_instances"


class Decision(NamedTuple):
    """What a user did to a task or, if `task` is empty, to a whole run."""

    dag_id: str
    run_id: str
    task: str
    what: str


class _Seen(BaseModel):
    """State kept beyond the process, so that its successor misses nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str | None = None  # the runtime folder of the platform with these pids
    pids: dict[str, int] = {}  # of parts that stayed
    told: tuple[str, ...] = ()  # those of them that have ended, and none has stayed in their place
    workspaces: tuple[Path, ...] = ()  # the runs that were live at the last pass
    after: str = ""  # time of the last noted decision


class Watch:
    """A watch of the platform and the runs; `look` is one pass."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = settings.home / "services" / "watch.json"
        kept = read_json(self._path) if self._path.exists() else {}
        self._seen = _Seen.model_validate({"after": datetime.now(UTC).isoformat()} | kept)
        self._files: dict[str, str] = {}  # of each DAG with a live run
        self._asked = time.time()  # when Airflow was last asked which runs are live
        self._ahead = time.time() - time.monotonic()

    def look(self, open_airflow: Callable[[], AirflowApi]) -> None:
        """Note new events and decisions.

        Raises:
            UserError, httpx.HTTPError, OSError: Airflow or supervisord is away; what could be
                noted without it has been noted.
        """
        self._note_set_clock()
        self._note_replaced()
        airflow = open_airflow()
        for event in airflow.events([*CLEARS, *_MARKS, _BULK_MARKS], self._after()):
            self._note_decisions(event)
            self._keep(after=event["when"])
        asked = time.time()
        live = list(airflow.runs(live=True))
        self._note_live(airflow, {run.dag_id for run in live})
        paths = (path for run in live for path in self._workspaces(run.dag_id, run.run_id))
        self._keep(workspaces=tuple(paths))
        self._asked = asked

    def _after(self) -> str:
        """Return since when decisions are new; those of a clock that was set back come again."""
        noted, now = self._seen.after, time.time()
        if datetime.fromisoformat(noted).timestamp() > now:
            return datetime.fromtimestamp(now - _SET_S, UTC).isoformat()
        return noted

    def _note_set_clock(self) -> None:
        """Note that this machine's clock was set; it also jumps when the machine slept."""
        ahead = time.time() - time.monotonic()
        by, self._ahead = ahead - self._ahead, ahead
        if abs(by) < _SET_S:
            return
        self._asked = min(self._asked, time.time() - _SET_S)
        how, done = "put on", "the run continued"
        if by < 0:
            how = "set back"
            done += "; its next task waits until the clock of Airflow is past the run's start"
        entry = Entry(
            kind="clock",
            key=f"clock of {socket.gethostname()} {time.monotonic():.0f}",
            stage="platform",
            cause=f"that of {socket.gethostname()} was {how} by {duration(abs(by))}",
            done=done,
        )
        for workspace in {*self._seen.workspaces, *self._begun()}:
            note(workspace, entry)

    def _note_live(self, airflow: AirflowApi, dag_ids: set[str]) -> None:
        """Note the recipes' own DAGs among those with live runs."""
        known = self._files
        self._files = {each: known.get(each) or airflow.dag_file(each) or "" for each in dag_ids}
        factories = (MAIN_DAG, REFRESH_DAG)
        note_live(
            {
                dag_id: file
                for dag_id, file in self._files.items()
                if file in factories and dag_id not in factories
            }
        )

    def _note_replaced(self) -> None:
        runtime = runtime_folder(self._settings)
        if runtime is None:
            return
        seen = self._seen if self._seen.runtime == str(runtime) else _Seen()
        processes = [each for each in Supervisor(runtime).processes().values() if each.pid]
        lost = [each for each in processes if seen.pids.get(each.name, each.pid) != each.pid]
        for each in lost:
            if each.name not in (*_UNTOLD, *seen.told):
                entry = service_lost(each.name, seen.pids[each.name], each.pid, "platform")
                for workspace in {*self._seen.workspaces, *self._begun()}:
                    note(workspace, entry)
        # One that ends again, soon or before Airflow has answered, as what it needs is still away,
        # tells nothing new.
        began = min(time.time() - _STAYS_S, self._asked)
        stays = {
            each.name: each.pid
            for each in processes
            if each.state == "RUNNING" and (each.name not in seen.pids or each.started <= began)
        }
        told = {*seen.told, *(each.name for each in lost)} - {*stays}
        self._keep(runtime=str(runtime), pids=seen.pids | stays, told=tuple(sorted(told)))

    def _begun(self) -> Iterator[Path]:
        """Yield workspaces of runs that began since the last pass, unknown until now."""
        for path in self._settings.runs.glob(f"*/{RUN_FILE}"):
            if path.stat().st_mtime > self._asked:
                yield path.parent

    def _note_decisions(self, event: dict[str, Any]) -> None:
        for number, decision in enumerate(decisions(event)):
            for workspace in self._workspaces(decision.dag_id, decision.run_id):
                entry = Entry(
                    kind="human decision",
                    key=f"airflow event {event['event_log_id']}.{number}",
                    stage=decision.task or "run",
                    cause=f"{event['owner']} {decision.what} it",
                    done="its job, if it had one, is stopped",
                )
                note(workspace, entry)

    def _workspaces(self, dag_id: str, run_id: str) -> Iterator[Path]:
        """Yield the workspaces of a run that has begun."""
        workspace = workspace_path(self._settings.runs, workspace_name(dag_id, run_id))
        if (workspace / RUN_FILE).is_file():
            yield workspace
            yield from members(workspace)

    def _keep(self, **changes: Any) -> None:
        seen = self._seen.model_copy(update=changes)
        if seen != self._seen:
            self._seen = seen
            write_json(self._path, seen.model_dump(mode="json"))


def decisions(event: dict[str, Any]) -> Iterator[Decision]:
    """Yield what a user cleared or marked, by an entry of Airflow's event log."""
    extra = json.loads(event["extra"] or "{}")
    if event["event"] == _BULK_MARKS:
        entities = [
            entity
            for action in extra.get("actions", ())
            for entity in action.get("entities", ())
            if isinstance(entity, dict)
        ]
    else:
        entities = [extra]
    for entity in entities:
        dag_id = entity.get("dag_id") or event["dag_id"]
        run_id = entity.get("dag_run_id") or event["run_id"]
        state = entity.get("new_state") or entity.get("state")
        what = "cleared" if event["event"] in CLEARS else state and f"marked {state}"
        if dag_id and run_id and what:
            yield Decision(dag_id, run_id, _tasks(entity) or event["task_id"] or "", what)


def is_cleared_by(
    event: dict[str, Any], dag_id: str, run_id: str, task_id: str, map_index: int
) -> bool:
    """Return whether a Clear's log entry names this task and includes running tasks."""
    asked = json.loads(event["extra"] or "{}")
    run = (asked.get("dag_id") or event["dag_id"], asked.get("dag_run_id") or event["run_id"])
    spares = asked.get("only_failed", True) or asked.get("prevent_running_task", False)
    if run != (dag_id, run_id) or spares:
        return False
    named = asked.get("task_ids") or []
    return task_id in named or [task_id, map_index] in named


def _tasks(entity: dict[str, Any]) -> str:
    tasks = [entity["task_id"]] if "task_id" in entity else entity.get("task_ids") or []
    # A mapped task is named with its index, as [task, index].
    return ", ".join(each if isinstance(each, str) else str(each[0]) for each in tasks)

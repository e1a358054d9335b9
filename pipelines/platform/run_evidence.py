"""All that is recorded of a run: its folder, and Airflow's and Ray's logs if they answer."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.core.errors import UserError
from pipelines.core.settings import Settings
from pipelines.core.storage import read_json
from pipelines.orchestration.job_state import JobState
from pipelines.recipe.schedule_section import MAIN_DAG
from pipelines.run.logbook import Entry, Kind, read_logbook
from pipelines.run.records import RUN_FILE, RegisterRecord, record_path
from pipelines.run.speed import Window, windows
from pipelines.run.usage import read_events
from pipelines.stages.stage_process import ERROR_FILE, FAILURE_FILE, TRACEBACK_FILE

# What the text of an error says about its kind; the first that fits counts.
_SIGNS: tuple[tuple[str, Kind], ...] = (
    (r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory", "out of memory"),
    (r"No space left|quota exceeded|can't be written|Could not connect to the end", "storage"),
    (r"reached its time limit", "time limit"),
    (r"the loss is \S+ at step", "rollback"),
    (r"its process was lost", "task lost"),
    (r"API request to \S+ failed|Connection refused|has not answered", "service lost"),
    (r"Timed out waiting \d+ms|collective operation timeout", "stall"),
)
_LOCKED = re.compile(r"^(\d{4}/\d\d/\d\d \S+) .*database is locked")  # in MLflow's log
_EXCEPTION = re.compile(r"^(?:\(.*?\) )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")  # Ray names a pid
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Evidence:
    """What is known of a run."""

    run: str
    workspace: Path
    entries: list[Entry]  # the logbook, and after it the errors that ended the run
    windows: list[Window]
    events: list[Any]  # the lines of `usage.jsonl`
    state: str = ""  # Airflow's, or `success`, `failed` or `not over` by the folder
    task: str = ""  # that failed
    error: str = ""  # the last exception in its logs
    log: str = ""  # where they are
    by_folder: bool = False  # whether Airflow did not tell of the run

    @property
    def got_on(self) -> float:
        """When the run last did what it need not do again, in seconds since 1970; 0 if never."""
        points = [window.milliseconds / 1000 for window in self.windows]
        return max([*points, *(e.time for e in self.events if e.event == "ended")], default=0.0)


def gather(settings: Settings, workspace: Path) -> Evidence:
    """Read everything about a run; the loss of its folder explains all other errors."""
    run = _read(workspace / RUN_FILE).get("dag_run_id", workspace.name)
    points, events = windows(workspace), read_events(workspace)
    entries = [e for e in read_logbook(workspace) if "answer to try" not in e.key]  # was asked for
    logs = [*settings.home.glob(f"airflow/logs/*/run_id={run}"), workspace / TRACEBACK_FILE]
    found = Evidence(run, workspace, entries, points, events, log=str(logs[0]))
    entries += _locked_database(settings.home / "services" / "mlflow.log", found)
    entries.sort(key=lambda entry: entry.time)
    if _listens(settings.airflow_url):  # else no slow module is imported to ask it
        _ask_airflow(settings, found)
    found.by_folder = not found.state
    found.state = found.state or _state_by_folder(found)
    if found.state == "failed":
        errors = list(_errors(found))
        entries += [e for e in errors if "workspace was removed" in e.cause] or errors
        found.task = found.task or next((e.stage for e in (*errors, *found.events[::-1])), "")
        jobs = JobState.of(workspace, found.task, -1).read().submissions
        if jobs and _listens(settings.ray_url):  # its log is nearer to the cause
            found.error = _last_exception(asyncio.run(_job_log(workspace, jobs[-1]))) or found.error
    return found


def kind_of(error: str) -> Kind:
    """Return the kind of fault that an error's text speaks of."""
    kinds = (kind for sign, kind in _SIGNS if re.search(sign, error, re.IGNORECASE))
    return next(kinds, "failure")


def _state_by_folder(found: Evidence) -> str:
    if record_path(found.workspace, RegisterRecord.stage).is_file():
        return "success"
    has_error = any((found.workspace / name).is_file() for name in (ERROR_FILE, FAILURE_FILE))
    is_failed = has_error or "failed" in [each.event for each in found.events[-1:]]
    return "failed" if is_failed else "not over"


def _errors(found: Evidence) -> Iterator[Entry]:
    """Yield the errors that ended the run, unless the logbook has them."""
    told = [entry.cause for entry in found.entries if entry.time.timestamp() > found.got_on]
    for name, stage, text in ((ERROR_FILE, "stage", "message"), (FAILURE_FILE, "task", "error")):
        if error := _read(found.workspace / name):
            moment = (found.workspace / name).stat().st_mtime
            is_old = moment < found.got_on - 1  # of a try before
            is_told = any(error[text] in each or each in error[text] for each in told)
            if not is_old and not is_told:
                told.append(error[text])
                yield fault(error[stage], moment, kind_of(error[text]), error[text])


def fault(stage: str, moment: float, kind: Kind, cause: str) -> Entry:
    """Return an entry about what no process noted; the moment is in seconds since 1970."""
    time = datetime.fromtimestamp(moment, UTC)
    return Entry(kind=kind, key=cause, stage=stage, cause=cause, done="", time=time)


def _locked_database(log: Path, found: Evidence) -> Iterator[Entry]:
    """Yield when MLflow's database was first locked while the run worked: no process notes it."""
    if log.is_file() and found.events:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for said in filter(None, map(_LOCKED.match, lines)):
                moment = datetime.strptime(said[1], "%Y/%m/%d %H:%M:%S").timestamp()
                if found.events[0].time < moment < found.got_on:
                    yield fault("platform", moment, "service lost", "MLflow's database was locked")
                    return


def _ask_airflow(settings: Settings, found: Evidence) -> None:
    """Add the run's state, and the name and the last error of the task that failed first."""
    import httpx  # it is slow to import

    from pipelines.platform.airflow_api import AirflowApi

    with suppress(UserError, httpx.HTTPError):  # something else may listen there
        airflow = AirflowApi(settings)
        for run in ((MAIN_DAG, found.run), found.run.partition("__")[::2]):  # or of another DAG
            if found.state or not run[1]:
                break
            with suppress(httpx.HTTPStatusError):
                found.state = airflow.run_state(*run)
                failed = [e for e in airflow.tasks(*run).values() if e["state"] == "failed"]
                for task in sorted(failed, key=lambda each: each["end_date"] or "")[:1]:
                    found.task = name = task["task_id"]
                    found.log = f"{settings.airflow_url}/dags/{run[0]}/runs/{run[1]}/tasks/{name}"
                    lines = airflow.log(*run, name, task["try_number"]).splitlines()
                    texts = (str(json.loads(line)["event"]) for line in lines)
                    found.error = _last_exception("\n".join(texts))


async def _job_log(workspace: Path, submission_id: str) -> str:
    import httpx

    from pipelines.orchestration.jobs_api import jobs_api

    with suppress(httpx.HTTPError, ValueError):  # a later cluster knows nothing of the job
        async with jobs_api(workspace) as jobs:
            return await jobs.logs(submission_id)
    return ""


def _last_exception(log: str) -> str:
    lines = (_COLOUR.sub("", line).strip() for line in reversed(log.splitlines()))
    return next((said[1] for said in map(_EXCEPTION.match, lines) if said), "")


def _listens(url: str) -> bool:
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    with suppress(OSError), socket.create_connection((place.hostname or "", port), timeout=2.0):
        return True
    return False


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}

"""A run's logbook: what happened to it, when, why, at what cost, and what was done about it.

Any process that sees an event writes it: a train worker, the job's driver, an Airflow task, the
platform's reconciler. The lines are in `logbook.jsonl` in the workspace. After each line, the whole
logbook is written as `logbook.md` to the MLflow run's artifacts, without MLflow's client, which
takes seconds to import.
"""

import logging
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.core.errors import UserError
from pipelines.core.line_files import append_line, read_lines
from pipelines.core.settings import load_settings
from pipelines.core.storage import one_at_a_time, read_object, write_text
from pipelines.run.records import RUN_FILE

LOGBOOK = "logbook.jsonl"
PAGE = "logbook.md"
_PROXIED = "mlflow-artifacts:"  # the tracking server's own store, written through the server
_UPLOAD_TIMEOUT_S = 10

_log = logging.getLogger(__name__)

Kind = Literal[
    "start",
    "resume",
    "preemption",
    "worker lost",
    "node lost",
    "driver lost",
    "cluster lost",
    "failure",  # a job ended with an error of its program
    "task lost",  # the process of an Airflow task
    "service lost",  # a part of the platform: the scheduler, the triggerer, MLflow, …
    "clock",  # it was set, while the run was at work
    "storage",  # full, slow or unreachable, or working again
    "rollback",
    "alarm",  # a model seems to please its rewards only
    "layout change",
    "workers changed",
    "out of memory",
    "stall",
    "slow rank",  # the others wait for a slow GPU, host or disk
    "corruption",  # hardware got bits wrong without an error
    "time limit",
    "human decision",
    "end",
]


class Entry(BaseModel):
    """One line of the logbook."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    key: str  # identifies the event; a key that is already in the logbook is not written again
    stage: str
    cause: str
    done: str  # what was done about it
    step: int | None = None
    worker_hours_lost: float | None = None
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))


def note(workspace: Path, entry: Entry) -> bool:
    """Write an entry unless its key is in the logbook, and return whether this call wrote it.

    A full disk or an unreachable artifact store must not stop the logged work, so an error is only
    logged as a warning. The next entry writes the whole page again.
    """
    try:
        with one_at_a_time(workspace / f".{LOGBOOK}.lock"):
            entries = read_logbook(workspace)
            if any(entry.key == known.key for known in entries):
                return False
            line = entry.model_dump_json(exclude_none=True)
            append_line(workspace / LOGBOOK, line, durable=True)
            _publish(workspace, page([*entries, entry]))  # within the lock: the last page is whole
    except (OSError, UserError) as error:
        _log.warning("logbook: %s: %s (%s)", entry.kind, entry.cause, error)
    return True


def read_logbook(workspace: Path) -> list[Entry]:
    """Return all entries, oldest first."""
    return read_lines(workspace / LOGBOOK, Entry)


def page(entries: list[Entry]) -> str:
    """Return the logbook as Markdown."""
    rows = ["| time (UTC) | event | stage | step | cause | done | worker-hours lost |"]
    rows.append("|---|---|---|--:|---|---|--:|")
    for entry in entries:
        lost = "" if entry.worker_hours_lost is None else f"{entry.worker_hours_lost:.4f}"
        step = "" if entry.step is None else str(entry.step)
        cells = (f"{entry.time:%Y-%m-%d %H:%M:%S}", entry.kind, entry.stage, step)
        texts = (entry.cause, entry.done, lost)
        rows.append("| " + " | ".join(_cell(text) for text in (*cells, *texts)) + " |")
    return "# Logbook\n\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _publish(workspace: Path, text: str) -> None:
    """Write the page to the MLflow run's artifacts, or to a workspace that has no MLflow run."""
    path = workspace / RUN_FILE
    place = read_object(path).get("mlflow_artifacts") if path.is_file() else None
    if place is None:
        write_text(workspace / PAGE, text)
    elif place.startswith(_PROXIED):
        _put(place, text)
    elif place.startswith("file:") or "://" not in place:
        write_text(Path(urllib.parse.unquote(place.removeprefix("file://"))) / PAGE, text)
    else:
        import fsspec

        with fsspec.open(f"{place}/{PAGE}", "w", encoding="utf-8") as file:
            file.write(text)


def _put(place: str, text: str) -> None:
    """Write through the tracking server, whose addresses look like `mlflow-artifacts:/<path>`."""
    server = load_settings().mlflow_url.rstrip("/")
    name = urllib.parse.quote(f"{urllib.parse.urlsplit(place).path.strip('/')}/{PAGE}")
    request = urllib.request.Request(  # noqa: S310 (the tracking server's own address)
        f"{server}/api/2.0/mlflow-artifacts/artifacts/{name}", text.encode(), method="PUT"
    )
    with urllib.request.urlopen(request, timeout=_UPLOAD_TIMEOUT_S):  # noqa: S310
        pass

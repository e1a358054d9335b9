"""A run's logbook: what befell it, when, why, at what cost, and what was done about it.

Anyone who sees something happen writes it, from any process: a train worker, the job's driver, an
Airflow task, the platform's reconciler. The lines lie in the workspace as `logbook.jsonl`; after
each one the whole is drawn as `logbook.md` among the artifacts of the MLflow run, without MLflow's
client, which takes seconds to import.
"""

import fcntl
import logging
import os
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_text
from pipelines.run.records import RUN_FILE

LOGBOOK = "logbook.jsonl"
PAGE = "logbook.md"
_PROXIED = "mlflow-artifacts:"  # the tracking server's own store, written through it
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
    "failure",  # of a job, by an error of its program
    "task lost",  # the process of an Airflow task
    "service lost",  # a part of the platform: the scheduler, the triggerer, MLflow, …
    "storage",  # full, slow or gone, and back
    "rollback",
    "layout change",
    "workers changed",
    "out of memory",
    "stall",
    "time limit",
    "human decision",
    "end",
]


class Entry(BaseModel):
    """One line of the logbook."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    key: str  # of the event: one that is there already is not written again
    stage: str
    cause: str
    done: str  # what was done about it
    step: int | None = None
    worker_hours_lost: float | None = None
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))


def note(workspace: Path, entry: Entry) -> bool:
    """Write an entry unless one with its key is there; returns whether this call wrote it.

    A full disk or an artifact store that is away must not end what is being logged: that is a
    warning in the log. The page is drawn whole again with the next entry.
    """
    try:
        with (workspace / LOGBOOK).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            entries = _parse(text)
            if any(entry.key == known.key for known in entries):
                return False
            # A full disk can leave half a line; the next one begins a line of its own.
            torn = "\n" if text and not text.endswith("\n") else ""
            file.write(f"{torn}{entry.model_dump_json(exclude_none=True)}\n")
            file.flush()
            os.fsync(file.fileno())
            _publish(workspace, page([*entries, entry]))  # within the lock: the last page is whole
    except OSError as error:
        _log.warning("logbook: %s: %s (%s)", entry.kind, entry.cause, error)
    return True


def read_logbook(workspace: Path) -> list[Entry]:
    """All entries, oldest first."""
    path = workspace / LOGBOOK
    return _parse(path.read_text(encoding="utf-8")) if path.exists() else []


def page(entries: list[Entry]) -> str:
    """The logbook as Markdown."""
    rows = ["| time (UTC) | event | stage | step | cause | done | worker-hours lost |"]
    rows.append("|---|---|---|--:|---|---|--:|")
    for entry in entries:
        lost = "" if entry.worker_hours_lost is None else f"{entry.worker_hours_lost:.4f}"
        step = "" if entry.step is None else str(entry.step)
        cells = (f"{entry.time:%Y-%m-%d %H:%M:%S}", entry.kind, entry.stage, step)
        texts = (entry.cause, entry.done, lost)
        rows.append("| " + " | ".join(_cell(text) for text in (*cells, *texts)) + " |")
    return "# Logbook\n\n" + "\n".join(rows) + "\n"


def _parse(text: str) -> list[Entry]:
    entries = []
    for line in text.splitlines():
        try:
            entries.append(Entry.model_validate_json(line))
        except ValueError:
            _log.warning("a line of the logbook is torn: %s", line[:80])
    return entries


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _publish(workspace: Path, text: str) -> None:
    """Put the page among the MLflow run's artifacts; a workspace without a run has none."""
    path = workspace / RUN_FILE
    place = read_json(path).get("mlflow_artifacts") if path.is_file() else None
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
    """Write through the tracking server, whose store has `mlflow-artifacts:/<path>` addresses."""
    server = load_settings().mlflow_url.rstrip("/")
    name = urllib.parse.quote(f"{urllib.parse.urlsplit(place).path.strip('/')}/{PAGE}")
    request = urllib.request.Request(  # noqa: S310 (the tracking server's own address)
        f"{server}/api/2.0/mlflow-artifacts/artifacts/{name}", text.encode(), method="PUT"
    )
    with urllib.request.urlopen(request, timeout=_UPLOAD_TIMEOUT_S):  # noqa: S310
        pass

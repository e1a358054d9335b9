"""Ends a stage that works for too long, from within: neither Airflow nor Ray has to be there."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.logbook import Entry, note, read_logbook
from pipelines.core.usage import usage_of

_HOUR_S = 3600.0
_KIND = "time limit"

_log = logging.getLogger(__name__)


@contextmanager
def time_limit(
    workspace: Path, stage: str, hours: float | None, keep: Callable[[UserError], None]
) -> Iterator[None]:
    """The block may last until the stage has worked for so many hours, all its tries together.

    Then the process ends at once, which in a Ray job's driver ends the whole job. A person's Clear
    gives the same time again.

    Args:
        workspace: where the stage's usage and the logbook lie.
        stage: its name.
        hours: None is no limit.
        keep: is given the one line before the end.
    """
    if hours is None:
        yield
        return
    before = sum(entry.kind == _KIND and entry.stage == stage for entry in read_logbook(workspace))
    left = (before + 1) * hours * _HOUR_S - usage_of(workspace, stage).seconds
    over = threading.Event()
    watchdog = threading.Thread(
        target=_watch,
        args=(over, left, partial(_tell, workspace, stage, hours, before, keep)),
        daemon=True,
    )
    watchdog.start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, left: float, tell: Callable[[], None]) -> None:
    if over.wait(max(left, 0.0)):
        return
    try:
        tell()
    finally:
        os._exit(EXIT_USER_ERROR)  # whatever the other threads do, and however full the disk is


def _tell(
    workspace: Path, stage: str, hours: float, before: int, keep: Callable[[UserError], None]
) -> None:
    error = UserError(
        f"{stage} reached its time limit, resources.max_stage_hours = {hours:g}; clear the task to "
        "give it as much again, from where it is, or start a run with a higher limit"
    )
    _log.error("%s", error)
    keep(error)
    entry = Entry(
        kind=_KIND,
        key=f"{_KIND} {stage} {before + 1}",
        stage=stage,
        cause=f"resources.max_stage_hours = {hours:g}",
        done="the whole job was ended",
    )
    note(workspace, entry)

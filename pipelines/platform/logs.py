"""Printing of the logs of the platform's parts."""

import time
from collections import deque
from pathlib import Path
from typing import TextIO

from pipelines.core.settings import Settings
from pipelines.platform.parts import NAMES
from pipelines.platform.platform import log_path

_POLL_S = 0.2


def logs_of(settings: Settings, part: str | None) -> dict[str, Path]:
    """Return the log of one part, or of every part, by name; a part that never ran has none.

    Raises:
        UserError: There is no such part.
    """
    names = [part] if part else NAMES
    logs = {name: log_path(settings, name) for name in names}
    return {name: path for name, path in logs.items() if path.exists()}


def show(logs: dict[str, Path], out: TextIO, last: int | None) -> None:
    """Print the whole logs, or their `last` lines."""
    for name, path in logs.items():
        with path.open(encoding="utf-8", errors="replace") as file:
            out.writelines(_named(name, line, logs) for line in deque(file, maxlen=last))


def follow(logs: dict[str, Path], out: TextIO) -> None:
    """Print new lines of the logs until interrupted."""
    files = {name: path.open(encoding="utf-8", errors="replace") for name, path in logs.items()}
    for file in files.values():
        file.seek(0, 2)
    while True:
        lines = [_named(name, line, logs) for name, file in files.items() for line in file]
        out.writelines(lines)
        out.flush()
        if not lines:
            time.sleep(_POLL_S)


def _named(name: str, line: str, logs: dict[str, Path]) -> str:
    return f"{name:<14}{line}" if len(logs) > 1 else line

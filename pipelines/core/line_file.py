"""A file of lines that grows: what a crash tore is dropped, what a full disk refused is kept."""

import logging
from collections.abc import Iterable
from pathlib import Path

from pipelines.core.storage import write_text

_log = logging.getLogger(__name__)


class LineFile:
    """Lines that one process appends; they never end what is being recorded.

    Attributes:
        path: The file, made with the first line.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read or written yet."""
        self.path = path
        self._size: int | None = None  # bytes of whole lines
        self._waiting = ""  # what the disk had no room for
        self._anew: str | None = None  # likewise, where the file is to be replaced

    def read(self) -> list[str]:
        """The whole lines that are there; a torn one at the end goes with the next `append`."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        self._size = content.rfind(b"\n") + 1
        return content[: self._size].decode("utf-8").splitlines()

    def append(self, line: str) -> None:
        """Add a line, and those before it that could not be written."""
        if self._anew is not None:
            self.replace([*self._anew.splitlines(), line])
            return
        if self._size is None:
            self.read()
        self._waiting += f"{line}\n"
        content = self._waiting.encode("utf-8")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self._size)
                file.write(content)
        except OSError as error:
            _log.warning("%s: its last lines wait: %s", self.path, error)
            return
        self._size = (self._size or 0) + len(content)
        self._waiting = ""

    def replace(self, lines: Iterable[str]) -> None:
        """Write the whole file anew; a reader sees the old one or the new one."""
        text = "".join(f"{line}\n" for line in lines)
        self._anew, self._waiting = text, ""
        try:
            write_text(self.path, text)
        except OSError as error:
            _log.warning("%s: can't be written anew yet: %s", self.path, error)
            return
        self._anew, self._size = None, len(text.encode("utf-8"))

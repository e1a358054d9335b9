"""Files of lines that grow, a JSON object a line: a crash or a full disk costs at most the last."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from pipelines.core.storage import write_text

_log = logging.getLogger(__name__)
T = TypeVar("T")


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Append a line in one write, so that the lines of several processes never mix.

    Where a full disk left half a line, the new one begins on a line of its own.

    Args:
        path: The file, created with its first line.
        line: The line, without its end.
        durable: Whether to wait until a power cut would not take the line.

    Raises:
        OSError: the disk is full, say; then a part of the line may be there.
    """
    with path.open("a+b") as file:
        is_torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            is_torn = file.read(1) != b"\n"
        file.write((b"\n" if is_torn else b"") + f"{line}\n".encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def parse_lines(lines: Iterable[str | bytes], kind: type[T]) -> list[T]:
    """Read each line as an object; a torn line is left out."""
    found, adapter = [], TypeAdapter(kind)
    for line in lines:
        try:
            found.append(adapter.validate_json(line))
        except ValueError:
            _log.debug("a line is torn: %r", line[:80])
    return found


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Read all lines of a file, which need not exist, as objects."""
    return parse_lines(path.read_bytes().splitlines() if path.exists() else (), kind)


class LineFile:
    """A file to which one process appends lines; a failed write never stops that process.

    Attributes:
        path: The file, created with the first line.
    """

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is read or written yet."""
        self.path = path
        self._size: int | None = None  # bytes of whole lines
        self._waiting = ""  # lines that could not be written yet
        self._anew: str | None = None  # the whole content, if `replace` could not write it yet

    def read(self) -> list[str]:
        """Return the file's whole lines; the next `append` removes a partial line at the end."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        self._size = content.rfind(b"\n") + 1
        return content[: self._size].decode("utf-8", "replace").split("\n")[:-1]

    def append(self, line: str) -> None:
        """Append a line, after the earlier lines that could not be written."""
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
            _log.warning("%s: the last lines could not be written yet: %s", self.path, error)
            return
        self._size = (self._size or 0) + len(content)
        self._waiting = ""

    def replace(self, lines: Iterable[str]) -> None:
        """Replace the whole file; a reader sees either the old content or the new."""
        text = "".join(f"{line}\n" for line in lines)
        self._anew, self._waiting = text, ""
        try:
            write_text(self.path, text)
        except OSError as error:
            _log.warning("%s: the file could not be rewritten yet: %s", self.path, error)
            return
        self._anew, self._size = None, len(text.encode("utf-8"))

"""JSON as objects of a class or type; what does not fit is refused in one line."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pipelines.core.errors import DamagedFileError
from pipelines.core.storage import read_bytes

T = TypeVar("T")


def read_model(path: Path, kind: type[T]) -> T:
    """Read a JSON file that Penstock wrote; raise UserError if it is missing or damaged."""
    try:
        return parse_model(read_bytes(path), kind, path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedFileError(f"{path}: there is no such file; run what writes it") from error


def parse_model(content: bytes, kind: type[T], where: object) -> T:
    """Read JSON; if it is no such object, raise a DamagedFileError that begins with `where`."""
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        reason = f"{first_fault(error)}; it is damaged, or another program or version wrote it"
        raise DamagedFileError(f"{where}: {reason}") from error


def first_fault(error: ValidationError) -> str:
    """Return where the first mistake is, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))

"""The files that a model's folder may hold: safetensors, JSON and text, never code that could run.

This module checks the kind of a file; `signing` checks that it is the file that was registered.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError

REGISTERED_META = "registered_model_meta"  # written by MLflow into a folder that it has loaded
_INDEX = ".safetensors.index.json"
_REMOTE_CODE = ("auto_map", "custom_pipelines")  # keys that tell transformers which code to import


def check_folder(folder: Path, label: str) -> None:
    """Check that every file of a model is complete and of an allowed kind.

    Args:
        folder: A folder in Hugging Face's format, with a card, a lineage and similar files.
        label: The model's name as a user writes it.

    Raises:
        UserError: A file is of another kind (a pickle, a program, a link), broken or truncated,
            asks for remote code, or names a file outside the folder.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            try:
                _check(path)
            except (ValueError, OSError, RecursionError) as error:
                name = path.relative_to(folder).as_posix()
                raise UserError(f"{label}: {name}: {error}") from error


def _check(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise ValueError("a link or a device cannot be part of a model")
    check = _CHECKS.get(path.suffix or path.name)
    if check is None:
        raise ValueError("a model holds safetensors, JSON and text only; a pickle can run code")
    check(path)


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # reads the header and checks the file's size
            pass
    except SafetensorError as error:
        raise ValueError(f"not a whole safetensors file: {error}") from error


def _check_json(path: Path) -> None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if path.name.endswith(_INDEX):
        _check_index(path, value)
    if path.name.endswith("config.json") and (key := _find_remote_code(value)):
        raise ValueError(f"{key!r} asks for code to be imported; remove it")


def _check_index(path: Path, value: Any) -> None:
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError("it has no 'weight_map'")
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise ValueError(f"{name!r} is a path that leads out of the folder")
        if not (path.parent / name).is_file():
            raise ValueError(f"{name!r} is missing")


def _find_remote_code(value: Any) -> str | None:
    if isinstance(value, dict):
        here = (key for key in _REMOTE_CODE if value.get(key))
        below = (found for each in value.values() if (found := _find_remote_code(each)))
        return next(here, None) or next(below, None)
    return None


def _check_text(path: Path) -> None:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not text in UTF-8") from error


def _check_patch(path: Path) -> None:
    with path.open("rb") as file:  # the sources may have any encoding
        if not file.read(11) == b"diff --git ":
            raise ValueError("not a git patch")


_CHECKS: dict[str, Callable[[Path], None]] = {
    ".safetensors": _check_safetensors,
    ".json": _check_json,
    ".sig": _check_json,
    ".md": _check_text,
    ".txt": _check_text,  # vocabularies of tokenizers
    ".jinja": _check_text,  # chat templates
    ".diff": _check_patch,
    "MLmodel": _check_text,
    REGISTERED_META: _check_text,
}

"""Ways to spoil a file: its bytes, the values of its JSON or YAML, and what lies in its place."""

import gzip
import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
import zstandard
from hypothesis import strategies as st

WORDS = json.loads((Path(__file__).parent / "words.json").read_text())
DEEP = 20_000
NESTED = ("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "- " * DEEP)
# As they stand in a file: some are no valid JSON, but what other tools write for it.
VALUES = (*WORDS["values"], *NESTED, "9" * 400, "9" * 5000, f'"{"x" * 70_000}"')
WHOLE = tuple(text.encode("latin-1") for text in (*WORDS["whole"], *VALUES))
BYTES = tuple(text.encode("latin-1") for text in WORDS["bytes"])
NUMBERS = (0, 1, 7, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
PLACES = ("nothing", "folder", "loop", "unreadable", "dangling")
OF_BYTES = ("flip", "delete", "repeat", "put", "cut", "splice", "number", "bom", "crlf", "utf-16")


class Edit(NamedTuple):
    """One change of a file; positions and numbers count round, so each fits any file."""

    kind: str
    at: int = 0
    size: int = 0


def _edits(*kinds: str) -> st.SearchStrategy[Edit]:
    return st.builds(Edit, st.sampled_from(kinds), st.integers(0, 2**20), st.integers(1, 2**10))


_values = _edits("value", "value", "value", "drop", "twice", "swap")
# A file by its number, and what happens to it.
INPUTS = st.tuples(
    st.integers(0, 99),
    st.lists(_values, min_size=1, max_size=2)
    | st.lists(_values | _edits(*OF_BYTES), min_size=1, max_size=3)
    | st.lists(_edits(*OF_BYTES), min_size=1, max_size=4)
    | st.lists(_edits("whole", "whole", "whole", "bomb", *PLACES), min_size=1, max_size=1),
)


def spoil(path: Path, edits: list[Edit], others: list[bytes]) -> None:
    """Apply edits to a file; `others` are the contents of files that it may be mixed with."""
    content = path.read_bytes()
    if (kind := edits[0].kind) in PLACES:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind != "nothing":  # also root, as whom tests may run, cannot read a process's memory
            targets = {"loop": path.name, "dangling": "gone", "unreadable": "/proc/self/mem"}
            path.symlink_to(targets[kind])
        return
    unpack, pack = _ARCHIVES.get(path.suffix, (bytes, bytes))
    inside = unpack(content)
    for edit in edits:
        inside = _bomb(path.suffix) if kind == "bomb" else _changed(path.name, inside, edit, others)
    packed = inside if kind == "bomb" else pack(inside)
    if packed != inside and edits[-1].at % 3 == 0:  # a broken archive, else one of broken things
        packed = _changed("", packed, edits[-1]._replace(kind="flip"), [])
    path.write_bytes(packed)


_ARCHIVES: dict[str, Any] = {
    ".gz": (gzip.decompress, lambda inside: gzip.compress(inside, 1)),
    ".zst": (zstandard.decompress, zstandard.compress),
}


@cache
def _bomb(suffix: str) -> bytes:
    """An archive of spaces, which are 2 GiB in zstd's."""
    if suffix != ".zst":
        return gzip.compress(b" " * (1 << 27), 1) if suffix == ".gz" else b" " * (1 << 22)
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join([packer.compress(b" " * (1 << 24)) for _ in range(128)]) + packer.flush()


def _changed(name: str, content: bytes, edit: Edit, others: list[bytes]) -> bytes:
    at = edit.at % (len(content) + 1)
    before, part, after = content[:at], content[at : at + edit.size], content[at + edit.size :]
    match edit.kind:
        case "flip":
            byte = bytes(each ^ (1 << edit.size % 8) for each in content[at : at + 1])
            return before + byte + content[at + 1 :]
        case "delete":
            return before + after
        case "repeat":
            return before + part * (2 + edit.size % 50) + after
        case "put":
            return before + BYTES[edit.size % len(BYTES)] + content[at:]
        case "cut":
            return before
        case "splice":
            return before + others[edit.at % len(others)][at : at + edit.size] + after
        case "bom":
            return b"\xef\xbb\xbf" + content
        case "crlf":
            return content.replace(b"\n", b"\r\n")
        case "utf-16":
            return content.decode(errors="replace").encode("utf-16")
        case "whole":
            return WHOLE[edit.at % len(WHOLE)]
    if edit.kind != "number" and (changed := _with_value(name, content, edit)):
        return changed
    width, aligned = 4 if edit.size % 2 else 8, at // 4 * 4
    number = struct.pack("<Q", NUMBERS[edit.size % len(NUMBERS)])[:width]
    return content[:aligned] + number + content[aligned + width :]


_UNFIT = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
_UNFIT += (yaml.YAMLError, RecursionError)


def _with_value(name: str, content: bytes, edit: Edit) -> bytes | None:
    """Return JSON or YAML with another value somewhere; None for a file that is neither."""
    if name.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        header = _with_value(".json", content[8 : 8 + length], edit)
        return header and len(header).to_bytes(8, "little") + header + content[8 + length :]
    if name.endswith(".jsonl") and (lines := content.split(b"\n"))[0]:
        number = edit.at % len(lines)
        lines[number] = _with_value(".json", lines[number], edit) or lines[number]
        return b"\n".join(lines)
    try:
        tree = yaml.safe_load(content) if name.endswith(".yaml") else json.loads(content)
        places = list(_places(tree))
        holder, key = places[edit.at % len(places)]
        other, its = places[edit.size % len(places)]
        if edit.kind == "drop":
            del holder[key]
        elif edit.kind == "swap":
            holder[key], other[its] = other[its], holder[key]
        else:
            holder[key] = "@@"
        text = json.dumps(tree, ensure_ascii=False)
    except _UNFIT:
        return None  # it is neither, holds nothing, or has become a circle
    raw = VALUES[edit.size % len(VALUES)]
    if edit.kind == "twice" and isinstance(holder, dict):
        raw = f"1, {json.dumps(key)}: {raw}"
    return text.replace('"@@"', raw).encode(errors="surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value: what holds it, and its key there."""
    waiting = [tree]
    while waiting and len(waiting) < 10_000:
        holder = waiting.pop()
        size = len(holder) if isinstance(holder, list) else 0
        for key in holder if isinstance(holder, dict) else range(size):
            yield holder, key
            waiting.append(holder[key])


def contents(folder: Path) -> dict[str, str | int]:
    """Return all names below a folder, with the links' targets and the files' sizes."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path): str(path.readlink()) if path.is_symlink() else path.stat().st_size
        for path in found
    }

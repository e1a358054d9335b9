"""Makes conversations of Python files: a question about each documented name, and its docstring.

Of pairs, the rejected answer has the same words in reverse order. It serves where no other
conversations are at hand; any machine has the standard library.
"""

import ast
import inspect
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath

from pipelines.data.normalize import MALFORMED, Document, decode, drop
from pipelines.data.reading.file_formats import Read, decompressed
from pipelines.data.reading.instruction import Fields, record_document

_LEAST_WORDS = 4  # a shorter docstring rarely says what a function does
_LONGEST = 400  # characters of an answer

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_documents(read: Read, fields: Fields) -> Iterator[Document]:
    """Yield a conversation for each public documented name of a file.

    A file that this Python cannot parse is one malformed document.
    """
    with decompressed(read) as file:
        raw = file.read()
    text = decode(read.path, raw)
    if isinstance(text, Document):
        yield text
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # such as an escape that is out of date
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield drop(read.path, len(raw), MALFORMED, f"not Python: {error}")
        return
    wanted = fields.instruction
    answered = wanted.chosen_field if wanted.is_preference else wanted.response_field
    for name, docstring in _documented(tree, _module(read.path)):
        answer = inspect.cleandoc(docstring).partition("\n\n")[0].replace("\n", " ")
        if len(answer) <= _LONGEST and len(words := answer.split()) >= _LEAST_WORDS:
            record = {wanted.prompt_field: f"What does {name} do?", answered: answer}
            if wanted.is_preference:
                record[wanted.rejected_field] = " ".join(reversed(words))
            yield record_document(f"{read.path}:{name}", len(answer), record, fields)


def _module(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts)


def _documented(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    docstring = ast.get_docstring(node, clean=False)
    if docstring and not isinstance(node, ast.Module):
        yield name, docstring
    if isinstance(node, ast.Module | ast.ClassDef):
        inner = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        for each in node.body:
            if isinstance(each, inner) and not each.name.startswith("_"):
                yield from _documented(each, f"{name}.{each.name}")

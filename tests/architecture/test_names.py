"""Names that a reader searches for lead to one place, and public docstrings are whole sentences."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipelines.core.settings import PROJECT

FILES = sorted(
    path
    for room in ("dags", "infra", "pipelines", "ray_jobs")
    for path in (PROJECT / room).rglob("*.py")
)
# No sentence of a function begins with these: "Of all parts.", "Whether it is there."
NO_BEGINNING = (
    *("A", "All", "An", "As", "At", "By", "For", "From", "How", "In", "Of", "On", "The", "To"),
    *("What", "When", "Where", "Whether", "Which", "Why", "With"),
)


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and not node.name.startswith("_") and not is_property(node):
                    yield path, node, text


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list)
    return any(name in ("property", "cached_property") for name in names)


def test_no_two_files_have_one_name():
    names = Counter(path.name for path in FILES if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_docstrings_of_public_functions_are_whole_sentences():
    bad = [
        f"{path.relative_to(PROJECT)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path, node, text in functions()
        if text.split()[0] in NO_BEGINNING
        or not text.split("\n\n")[0].rstrip().endswith((".", ":"))
    ]
    assert bad == []


def test_every_test_that_is_called_slow_exists():
    lines = (PROJECT / "tests" / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    paths = [line.removeprefix("--ignore=") for line in lines]
    assert [path for path in paths if not (PROJECT / path).exists()] == []

"""The package of extensions in docs/extensions.md, as files."""

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.core import extensions

PAGE = Path(__file__).parents[1] / "docs" / "extensions.md"
_BLOCK = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "team_nlp"


def write_package(folder: Path) -> None:
    """Write every file that the page shows."""
    for name, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / NAME / "__init__.py").touch()


def install(folder: Path) -> None:
    """Write what an installer leaves beside a package's code, without a build."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / f"{NAME}-{project['version']}.dist-info"
    metadata.mkdir()
    required = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: team-nlp\nVersion: {project['version']}\n{required}"
    )
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def installed_package(folder: Path) -> Iterator[None]:
    """Have the package of the page, from a folder, as if it were installed."""
    write_package(folder)
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        extensions._installed.cache_clear()
        yield
    extensions._installed.cache_clear()
    forget_modules()


def forget_modules() -> None:
    """Have the package imported anew, because its files are others."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]

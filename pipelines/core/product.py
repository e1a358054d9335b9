"""The product and the project: Penstock's own files, and the git repository that it works for.

A project holds a team's recipes; `penstock init` makes one. A checkout of Penstock is one too.
"""

import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

from pipelines.core.errors import UserError

VERSION = "0.1.0"  # here, as in an image Penstock is a checkout, which no installer knows of
PRODUCT = Path(__file__).resolve().parents[2]  # the folder of the packages in CODE
CODE = ("pipelines", "ray_jobs")  # what stages and Ray jobs import, from their workspace
_INSTALLED = PRODUCT / "pipelines" / "product_files"  # a wheel has no folder but its packages
PRODUCT_FILES = PRODUCT if (PRODUCT / "dvc.yaml").is_file() else _INSTALLED
DAGS = PRODUCT_FILES / "dags"
RECIPES = PRODUCT / "pipelines" / "recipes"  # those that come with Penstock
LOCK = "requirements.lock"
TABLE = "[tool.penstock]"  # the line of pyproject.toml that makes a git repository a project
_WORKSPACE_FILES = ("dvc.yaml", ".dvc/config", ".dvcignore")


def find_project() -> Path | None:
    """Return the project: PENSTOCK_PROJECT, the one around the working directory, or a checkout.

    It is None where Penstock is an installed package and no project is near.
    """
    if given := os.environ.get("PENSTOCK_PROJECT"):
        return Path(given).expanduser().absolute()
    here = Path.cwd()
    around = (folder for folder in (here, *here.parents) if is_project(folder))
    return next(around, PRODUCT if PRODUCT == PRODUCT_FILES else None)


def is_project(folder: Path) -> bool:
    """Return whether `penstock init` made this folder."""
    try:
        lines = (folder / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.strip() == TABLE for line in lines)


def recipes_folder(project: Path) -> Path:
    """Return the folder of a project's own recipes; those of a checkout are the shipped ones."""
    return RECIPES if project == PRODUCT else project / "recipes"


@cache
def product_state() -> dict[str, str]:
    """Return the product's version, and a digest of its code that changes with any byte."""
    return {"version": VERSION, "code": code_digest()}


def code_digest() -> str:
    """Return a digest of the names and contents of all code that a DAG or a stage may import."""
    return digest_of(*(PRODUCT / name for name in CODE), DAGS)


def digest_of(*folders: Path) -> str:
    """Return a digest of the names and contents of the Python files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = str(path.relative_to(folder.parent)).encode()
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def add_product(workspace: Path) -> None:
    """Copy the product's code into the clone of a team's project.

    A run so ends with the code that it began with, whatever is installed meanwhile.

    Raises:
        UserError: The project has a file or folder of the same name.
    """
    ignored = shutil.ignore_patterns("__pycache__", _INSTALLED.name)
    for name in CODE:
        if (workspace / name).exists():
            raise UserError(
                f"the project has a {name}/ of its own, which hides Penstock's: rename it"
            )
        shutil.copytree(PRODUCT / name, workspace / name, ignore=ignored)
    files = _WORKSPACE_FILES + (() if (workspace / LOCK).is_file() else (LOCK,))
    for name in files:
        (workspace / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(PRODUCT_FILES / name, workspace / name)

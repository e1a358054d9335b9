"""`penstock init`: a team's own project, a git repository in which every command works."""

import json
import re
import shlex
import shutil
import subprocess
from importlib.metadata import Distribution, distribution
from pathlib import Path
from string import Template
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from pipelines.commands.options import user_name
from pipelines.core.errors import UserError

_TEMPLATE = Path(__file__).with_name("project_template")
_FILES = {
    "project.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "check.yml": ".github/workflows/check.yml",
    "first.yaml": "recipes/first.yaml",
}


def init(path: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")]) -> None:
    """Make a project for your own recipes: a git repository in which every command works.

    It gets a recipe that runs as it is, the wheel that Penstock was installed from, the versions of
    all packages, a CI file, and the schema by which an editor completes and checks recipes.
    """
    from pipelines.core.product import LOCK, PRODUCT_FILES
    from pipelines.core.storage import fresh_folder
    from pipelines.recipe.recipe_files import SCHEMA, schema_text

    project = path.expanduser().absolute()
    if project.exists() and (not project.is_dir() or any(project.iterdir())):
        raise UserError(f"{project} exists and is not empty; name a folder that does not exist yet")
    product = distribution("penstock")
    wheel = f"wheels/penstock-{product.version}-py3-none-any.whl"
    names = {"name": _package_name(project.name), "owner": user_name()}
    values = names | {"version": product.version, "wheel": wheel}
    given = _installed_wheel(product)
    with fresh_folder(project) as folder:
        for template, target in _FILES.items():
            text = Template((_TEMPLATE / template).read_text(encoding="utf-8"))
            _write(folder / target, text.substitute(values))
        _write(folder / LOCK, (PRODUCT_FILES / LOCK).read_text(encoding="utf-8"))
        _write(folder / "recipes" / SCHEMA, schema_text())
        (folder / "data").mkdir()
        (folder / "wheels").mkdir()
        if given:
            shutil.copyfile(given, folder / wheel)
        _commit(folder)
    typer.echo(f"made {project}, a project with the recipe `first`")
    if not given:
        typer.echo(f"copy the wheel that `make dist` builds of Penstock to {wheel} in it")
    typer.echo(f"next: cd {shlex.quote(str(project))}; its README.md says how to begin")


def _installed_wheel(product: Distribution) -> Path | None:
    """Return the wheel file that Penstock was installed from, if it is still there."""
    origin = json.loads(product.read_text("direct_url.json") or "{}").get("url", "")
    path = Path(unquote(urlsplit(origin).path))
    return path if path.suffix == ".whl" and path.is_file() else None


def _package_name(folder: str) -> str:
    """Return the folder's name as a package and a model may have it."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "models"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _commit(folder: Path) -> None:
    """Make the folder a git repository with one commit, by the user if git knows one."""
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    known = subprocess.run([*git, "var", "GIT_COMMITTER_IDENT"], capture_output=True, check=False)
    if known.returncode:
        name = user_name()
        git += ["-c", f"user.name={name}", "-c", f"user.email={name}@localhost"]
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "A Penstock project"], check=True)

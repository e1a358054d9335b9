"""Opens a workspace: a clone of the project at a run's commit, where its stages run and write.

Everything that affects a stage's result is a file in it, so that DVC can key the stage cache:
`code.json`, `params.yaml`, `source.json`, `previous.json`, `environment.json`.
"""

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.product import (
    LOCK,
    PRODUCT_FILES,
    add_product,
    product_state,
    recipes_folder,
)
from pipelines.core.storage import (
    folder_hash,
    fresh_folder,
    md5,
    write_json,
    write_text,
)
from pipelines.recipe.bias_templates import load_bias_templates
from pipelines.recipe.evaluation_section import Bias
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.run.records import PATCH_FILE, RUN_FILE
from pipelines.run.workspace import Run, workspace_path
from pipelines.stage_cache.fingerprint import write_code
from pipelines.stage_cache.used_extensions import extension_fingerprints

STAGE_CACHE = "dvc-cache"
_WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json")


def open_workspace(
    project: Path,
    home: Path,
    run_id: str,
    recipe: Recipe,
    source: dict[str, Any],
    previous: dict[str, Any] | None = None,
    state: tuple[str, bytes] | None = None,
    ready: Recipe | None = None,
) -> Path:
    """Make the workspace of a run, or return the one that an earlier attempt made.

    Args:
        project: a git checkout; its HEAD, the diff of its tracked files and its new recipes are
            run. Penstock's own code is in it or is copied into the workspace.
        home: `PENSTOCK_HOME`, which holds the workspace and the shared stage cache.
        run_id: the DAG run's id.
        recipe: the resolved recipe, written as `params.yaml`.
        source: the fingerprint of the source's content, written as `source.json`.
        previous: the statistics of the previous dataset version, with which *validate* compares the
            new ones; written as `previous.json`, which is empty if there is none.
        state: another commit of the project to run instead, and the diff to apply to it.
        ready: the recipe with the folders of the registered models that it names, if it does.

    Raises:
        UserError: the project is not a git checkout with a commit, or lacks this commit.
    """
    workspace = workspace_path(home / "runs", run_id)
    if (workspace / RUN_FILE).is_file():
        return workspace
    commit, patch = state or project_state(project)
    _check_commit(project, commit)
    with fresh_folder(workspace) as folder:
        _check_out(project, folder, commit, patch)
        _configure_dvc(folder, site=workspace / ".dvc/tmp/site", cache=home / STAGE_CACHE)
        write_text(folder / "params.yaml", dump_yaml(recipe))
        write_json(folder / "source.json", source)
        write_json(folder / "previous.json", previous or {})
        write_json(folder / "environment.json", environment(folder, ready or recipe))
        write_code(folder)
        Run(
            dag_run_id=run_id,
            git_commit=commit,
            dirty=bool(patch),
            recipe_fingerprint=recipe.fingerprint(),
            product=product_state(),
        ).write(folder)
    return workspace


def _check_commit(project: Path, commit: str) -> None:
    try:
        _git(project, "cat-file", "-e", f"{commit}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise UserError(f"{project} has no commit {commit}; `git fetch` it first") from error


def _check_out(project: Path, folder: Path, commit: str, patch: bytes) -> None:
    """Clone a project at a commit, with the diff applied and with Penstock's code in it."""
    _git(folder, "clone", "--quiet", "--no-checkout", str(project), ".")
    _git(folder, "checkout", "--quiet", "--detach", commit)
    if patch:
        (folder / PATCH_FILE).write_bytes(patch)
        _git(folder, "apply", "--whitespace=nowarn", PATCH_FILE)
    if not (folder / "pipelines" / "cli.py").is_file():  # a team's, not a checkout of Penstock
        add_product(folder)


def project_state(project: Path) -> tuple[str, bytes]:
    """Return the commit of a checkout, and what differs from it in tracked files and in recipes.

    A recipe that git does not know yet runs as well, so the diff holds it.

    Raises:
        UserError: the project is not a git checkout with a commit.
    """
    try:
        commit = _git(project, "rev-parse", "--verify", "HEAD").decode().strip()
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or ["?"])[-1]
        raise UserError(
            f"{project}: {reason}; Penstock runs a commit of a git checkout: "
            "`git init`, `git add -A`, `git commit`"
        ) from error
    # Ignore the user's git settings for colours, prefixes and external tools.
    options = ("--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
    patch = _git(project, "diff", *options, commit)
    folder = str(recipes_folder(project).relative_to(project))
    new = _git(project, "ls-files", "-z", "--others", "--exclude-standard", folder)
    for name in filter(None, os.fsdecode(new).split("\0")):
        # With exit code 1 it says that the file differs from none.
        patch += _git(project, "diff", *options, "--no-index", "/dev/null", name, success=1)
    return commit, patch


def environment(workspace: Path, recipe: Recipe) -> dict[str, Any]:
    """Return what besides code, data and recipe affects a result; files are hashed by content.

    The hash of the whole lock is for later look-up: a stage's key has only its own packages.
    """
    place = workspace if (workspace / LOCK).is_file() else PRODUCT_FILES
    lock = (place / LOCK).read_bytes()
    return {
        "lock": hashlib.sha256(lock).hexdigest(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu",
        "world_size": recipe.resources.workers,
        "init_from": _weights_hash("model", recipe.model.init_from),
        "adapter": _weights_hash("adapter", recipe.adapter.init_from),
        "bias_templates": _templates_hash(recipe.evaluate.bias),
        "tasks": [_task_hash(path) for path in recipe.evaluate.harness.files],
        "extensions": extension_fingerprints(recipe),
    }


def _weights_hash(section: str, folder: str | None) -> str | None:
    """Hash what training reads of a folder, so that a copy with another lineage is the same."""
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise UserError(f"{section}.init_from = {folder}: no such folder")
    found = {path.name: md5(path) for name in _WEIGHTS for path in sorted(Path(folder).glob(name))}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _templates_hash(bias: Bias) -> str | None:
    """Hash the user's own templates, or fail if they are broken; Penstock's are a dep."""
    if not bias.enabled or bias.templates is None:
        return None
    load_bias_templates(bias.templates)
    return md5(Path(bias.templates).expanduser())


def _task_hash(path: str) -> str:
    """Hash the task file's folder, because it also holds the task's data and functions."""
    if not Path(path).is_file():
        raise UserError(f"evaluate.harness.files: {path}: no such file")
    return folder_hash(Path(path).parent)


def _configure_dvc(folder: Path, *, site: Path, cache: Path) -> None:
    # Give each clone its own site cache: clones would wait for the lock of the default one.
    cache.mkdir(parents=True, exist_ok=True)
    text = f'[core]\n    site_cache_dir = "{site}"\n[cache]\n    dir = "{cache}"\n'
    write_text(folder / ".dvc" / "config.local", text)


def _git(folder: Path, *arguments: str, success: int = 0) -> bytes:
    """Return a git command's output; raise CalledProcessError, whose stderr says what failed."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != success:
        done.check_returncode()
    return done.stdout

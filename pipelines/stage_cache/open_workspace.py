"""Opens a workspace: a clone of the project at a run's commit, where its stages run and write.

Everything that decides a stage's result lies in it as a file, so that DVC can key the stage cache:
`code.json`, `params.yaml`, `source.json`, `previous.json`, `environment.json`.
"""

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, fresh_folder, md5, write_json, write_text
from pipelines.recipe.bias_templates import load_bias_templates
from pipelines.recipe.evaluation_section import Bias
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.run.records import PATCH_FILE, RUN_FILE
from pipelines.run.workspace import Run, workspace_path
from pipelines.stage_cache.fingerprint import write_code

STAGE_CACHE = "dvc-cache"


def open_workspace(
    project: Path,
    home: Path,
    run_id: str,
    recipe: Recipe,
    source: dict[str, Any],
    previous: dict[str, Any] | None = None,
    state: tuple[str, bytes] | None = None,
) -> Path:
    """Make the workspace of a run, or return the one that an earlier try made.

    Args:
        project: a git checkout; its HEAD and the diff of its tracked files are what runs.
        home: `PENSTOCK_HOME`; the workspace and the shared stage cache lie in it.
        run_id: the DAG run's id.
        recipe: the resolved recipe, written as `params.yaml`.
        source: the fingerprint of the source's content, written as `source.json`.
        previous: the statistics of the dataset version before, which *validate* compares the new
            ones with; written as `previous.json`, empty where there is none.
        state: another commit of the project and the diff that was run on it.

    Raises:
        UserError: the project is not a git checkout with a commit, or not with this one.
    """
    workspace = workspace_path(home / "runs", run_id)
    if (workspace / RUN_FILE).is_file():
        return workspace
    commit, patch = state or project_state(project)
    _check_commit(project, commit)
    with fresh_folder(workspace) as folder:
        _git(folder, "clone", "--quiet", "--no-checkout", str(project), ".")
        _git(folder, "checkout", "--quiet", "--detach", commit)
        if patch:
            (folder / PATCH_FILE).write_bytes(patch)
            _git(folder, "apply", "--whitespace=nowarn", PATCH_FILE)
        _configure_dvc(folder, site=workspace / ".dvc/tmp/site", cache=home / STAGE_CACHE)
        write_text(folder / "params.yaml", dump_yaml(recipe))
        write_json(folder / "source.json", source)
        write_json(folder / "previous.json", previous or {})
        write_json(folder / "environment.json", environment(folder, recipe))
        write_code(folder)
        Run(
            dag_run_id=run_id,
            git_commit=commit,
            dirty=bool(patch),
            recipe_fingerprint=recipe.fingerprint(),
        ).write(folder)
    return workspace


def _check_commit(project: Path, commit: str) -> None:
    try:
        _git(project, "cat-file", "-e", f"{commit}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise UserError(f"{project} has no commit {commit}; `git fetch` it first") from error


def project_state(project: Path) -> tuple[str, bytes]:
    """The commit of a checkout, and the diff of its tracked files against it.

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
    # Whatever the user's own git configuration says of colours, prefixes and external tools.
    options = ("--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
    return commit, _git(project, "diff", *options, commit)


def environment(workspace: Path, recipe: Recipe) -> dict[str, Any]:
    """What besides code, data and recipe decides a result, by content where it is a file.

    The whole lock is there to be looked up later: a stage's key has its own packages only.
    """
    lock = (workspace / "requirements.lock").read_bytes()
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
    }


def _weights_hash(section: str, folder: str | None) -> str | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise UserError(f"{section}.init_from = {folder}: no such folder")
    return folder_hash(Path(folder))


def _templates_hash(bias: Bias) -> str | None:
    """Hash a user's own file; Penstock's is a dep. A broken one stops a run here."""
    if not bias.enabled or bias.templates is None:
        return None
    load_bias_templates(bias.templates)
    return md5(Path(bias.templates).expanduser())


def _task_hash(path: str) -> str:
    """Hash the task file's folder: its data and functions lie beside it."""
    if not Path(path).is_file():
        raise UserError(f"evaluate.harness.files: {path}: no such file")
    return folder_hash(Path(path).parent)


def _configure_dvc(folder: Path, *, site: Path, cache: Path) -> None:
    # The site cache of a clone is its own: the default one is locked by every clone in turn.
    cache.mkdir(parents=True, exist_ok=True)
    text = f'[core]\n    site_cache_dir = "{site}"\n[cache]\n    dir = "{cache}"\n'
    write_text(folder / ".dvc" / "config.local", text)


def _git(folder: Path, *arguments: str) -> bytes:
    """Output of a git command; raises CalledProcessError, whose stderr says why."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout

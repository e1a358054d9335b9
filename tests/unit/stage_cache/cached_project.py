"""A small project with stages, its clones as runs, and the real git and DVC."""

import subprocess
from pathlib import Path

from pipelines.recipe.recipe_files import load_recipe
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import open_workspace

DVC_YAML = """
stages:
  first:
    cmd: python first.py
    deps: [source.json, first.py]
    params:
      - params.yaml: [seed, data]
      - environment.json: [lock]
    outs: [outputs/first]
  second:
    cmd: python second.py
    deps: [outputs/first]
    params:
      - params.yaml: [train]
    outs: [outputs/second]
  last:
    cmd: python last.py
    deps: [outputs/second]
    outs: [outputs/last]
    always_changed: true
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True)


def make_project(parent: Path) -> Path:
    """A checkout in `parent`; its runs' home will lie beside it."""
    folder = parent / "the project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc/config").write_text('[cache]\n    type = "reflink,copy"\n')
    (folder / ".dvc/.gitignore").write_text("/config.local\n/tmp\n")
    (folder / ".gitignore").write_text("/outputs/\n")
    (folder / "dvc.yaml").write_text(DVC_YAML)
    (folder / "requirements.lock").write_text("torch==2.13.0\n")
    (folder / "first.py").write_text("print(1)\n")
    (folder / "pipelines").mkdir()
    (folder / "pipelines/cli.py").touch()  # a checkout of Penstock, with a dvc.yaml of its own
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def open_run(project: Path, run_id: str, *overrides: str, source: str = "a") -> Path:
    recipe = load_recipe("debug", overrides)
    home = project.parent / "home"
    return open_workspace(project, home, run_id, recipe, {"content": source})


def run_stage(workspace: Path, stage: str, content: str = "result") -> bool:
    """Restore a stage or run it; True where it was cached."""
    if dvc_cache.restore(workspace, stage):
        return True
    folder = workspace / "outputs" / stage
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "deep/data.bin").write_text(content * 1000)
    (folder / "record.json").write_text("{}")
    dvc_cache.commit(workspace, stage)
    return False

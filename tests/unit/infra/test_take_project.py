"""A team's project on a cluster: it comes as a git bundle, and each container finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.product import VERSION
from pipelines.core.settings import PROJECT
from tests.infra.runbook import commands

IMAGES = PROJECT / "infra" / "images"
# Stands in for docker and kubectl: it runs the command of `exec` as a container of Airflow would.
EXEC = f"""#!/bin/sh
while [ "$1" != infra/images/take-project.sh ]; do shift; done
cd "{PROJECT}" && exec "$@"
"""


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(project: Path, text: str) -> str:
    (project / "recipes").mkdir(exist_ok=True)
    (project / "recipes" / "mine.yaml").write_text(text)
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", text)
    return git(project, "rev-parse", "HEAD")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "our models"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a container, and of a user's shell with the two programs."""
    programs, home = tmp_path / "programs", tmp_path / "a home"
    for folder in (programs, home, tmp_path / "secrets"):
        folder.mkdir()
    for name in ("docker", "kubectl"):
        (programs / name).write_text(EXEC)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PENSTOCK_HOME": str(home),
        "PENSTOCK_SECRETS": str(tmp_path / "secrets"),
        "IMAGES": "images.env",
    }


@pytest.mark.parametrize("where", ["On Compose", "On Kubernetes"])
def test_the_docs_command_brings_the_project_and_then_each_new_commit(where, project, environment):
    command = commands("Your team's project", where)
    taken = Path(environment["PENSTOCK_HOME"]) / "project"
    for text in ("one", "two"):
        head = commit(project, text)
        told = subprocess.check_output(command, shell=True, cwd=project, env=environment, text=True)
        assert told == f"project: main is {head}\n"
        assert (taken / "recipes" / "mine.yaml").read_text() == text
        assert git(taken, "status", "--porcelain") == ""
    git(project, "checkout", "--quiet", "--orphan", "anew")
    head = commit(project, "written anew")
    git(project, "branch", "--move", "--force", "main")
    subprocess.run(command, shell=True, cwd=project, env=environment, check=True)
    assert git(taken, "rev-parse", "HEAD") == head


def test_what_is_no_bundle_leaves_the_project_as_it_is(project, environment):
    head = commit(project, "one")
    bundle = subprocess.check_output(["git", "-C", project, "bundle", "create", "-", "main"])
    script, taken = IMAGES / "take-project.sh", Path(environment["PENSTOCK_HOME"]) / "project"
    subprocess.run([script], input=bundle, env=environment, check=True)
    assert subprocess.run([script], input=b"no bundle", env=environment).returncode != 0
    assert subprocess.run([script, "no-such"], input=bundle, env=environment).returncode != 0
    assert git(taken, "rev-parse", "HEAD") == head


def test_a_container_knows_the_project_if_there_is_one(project, environment):
    def known() -> str:
        command = [IMAGES / "entrypoint.sh", "sh", "-c", 'echo "${PENSTOCK_PROJECT-none}"']
        return subprocess.check_output(command, env=environment, text=True).strip()

    assert known() == "none"
    taken = Path(environment["PENSTOCK_HOME"]) / "project"
    taken.mkdir()
    assert known() == str(taken)


def test_penstock_knows_its_version_where_no_installer_has_been():
    """As in an image, which has a checkout; without `site` Python sees no installed package."""
    code = "from pipelines.core.product import product_state; print(product_state()['version'])"
    told = subprocess.check_output([sys.executable, "-S", "-c", code], cwd=PROJECT, text=True)
    assert told.strip() == VERSION

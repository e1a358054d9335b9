"""The project, its environment and its platform in a folder with spaces and a very long path."""

import os
import subprocess
from pathlib import Path

import pytest

from pipelines.core.machine import free_port
from tests.conftest import FOREIGN, PORT_VARIABLES
from tests.project_copy import copy_project

LENGTH = 150


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the project's files whose path has at least 150 characters, spaces among them."""
    folder = tmp_path / "odd path"
    folder /= "x" * (LENGTH - len(str(folder)) - len("/pen stock") - 1)
    folder /= "pen stock"
    copy_project(folder)
    assert len(str(folder)) >= LENGTH
    return folder


@pytest.mark.timeout(900)
def test_installs_starts_and_runs_a_job_in_an_odd_path(clone: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in FOREIGN},
        **{variable: str(free_port()) for variable in PORT_VARIABLES},
    }
    environment.pop("PENSTOCK_HOME", None)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("make env")
    try:
        run(".venv/bin/penstock up")
        assert run(".venv/bin/penstock status --json")
        job = "ray job submit --working-dir . -- python -c 'import pipelines; print(\"here\")'"
        assert "here" in run(f'eval "$(.venv/bin/penstock env)" && {job}')
    finally:
        run(".venv/bin/penstock down")

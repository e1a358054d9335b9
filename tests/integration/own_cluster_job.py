"""A training on a Ray cluster of its own, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT

needs_a_path_for_ray = pytest.mark.skipif(
    " " in sys.executable, reason="Ray's own test cluster takes no such path"
)


def run_job(
    code: str, workspace: Path, values: Sequence[str], variables: Mapping[str, str], seconds: float
) -> str:
    """Run Python code with the arguments of a job, and return what it prints."""
    sets = [part for each in values for part in ("--set", each)]
    own = {"OMP_NUM_THREADS": "1", "PENSTOCK_HOME": str(workspace.parent / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--recipe", "debug", "--workspace", str(workspace), *sets],
        cwd=PROJECT,
        env=os.environ | own | dict(variables),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout

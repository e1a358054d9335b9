"""`penstock stage`: a stage in the terminal, with neither Airflow nor Ray."""

import os
import subprocess

import pytest

from pipelines.core.settings import PROJECT
from tests.conftest import FOREIGN, PENSTOCK

BRIEF = (
    "--set=train.steps=6",
    "--set=evaluate.bias.enabled=false",
    "--set=evaluate.sample_tokens=0",
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PENSTOCK, "stage", *arguments, "--recipe", "debug", *BRIEF],
            cwd=PROJECT,
            env={**environment, "PENSTOCK_HOME": str(home)},
            capture_output=True,
            text=True,
        )

    return run


def test_a_stage_needs_the_ones_before_it(stage):
    early = stage("train")
    assert early.returncode == 2
    assert "run `penstock stage preprocess` first" in early.stderr.splitlines()[-1]
    assert stage("no-such").returncode == 2


@pytest.mark.long
def test_the_stages_run_one_after_another(stage):
    for name in ("preprocess", "validate", "train", "evaluate"):
        done = stage(name)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert done.stdout.strip().endswith(f"outputs/{name}")
    # Another evaluation goes on from the trained model, in a workspace of its own.
    other = stage("evaluate", "--set", "evaluate.max_bytes=1000")
    assert other.returncode == 0, other.stderr

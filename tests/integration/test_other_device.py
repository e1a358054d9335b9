"""The engine on an accelerator that it has never heard of."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.settings import PROJECT


def train(module: str, workspace: Path) -> list[dict[str, Any]]:
    sets = ["data.source.max_documents=12", "train.steps=4", "train.log_every=1"]
    arguments = ["--recipe", "debug", "--workspace", str(workspace)]
    arguments += [part for each in sets for part in ("--set", each)]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PENSTOCK_HOME": str(workspace.parent / "home")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    text = (workspace / "outputs" / "train" / "history.jsonl").read_text()
    assert "npu" in done.stderr or module == "pipelines.training"
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parity
def test_it_trains_as_on_the_cpu(tmp_path: Path) -> None:
    there = train("tests.integration.fake_device", tmp_path / "npu")
    here = train("pipelines.training", tmp_path / "cpu")
    assert len(here) == 4
    for found, expected in zip(there, here, strict=True):
        assert found.pop("samples") == expected.pop("samples")
        assert found == pytest.approx(expected, rel=1e-5)

"""The engine by torchrun, with no service; on other numbers of processes a run goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.settings import PROJECT
from pipelines.run.logbook import read_logbook
from pipelines.run.records import TrainRecord
from tests.processor_time import limit

OVERRIDES = [
    "data.source.max_documents=12",
    "train.steps=6",
    "train.log_every=1",
    "parallel.sharding=full",
]


def begin(processes: int, workspace: Path, *overrides: str) -> subprocess.Popen[str]:
    sets = [part for each in (*OVERRIDES, *overrides) for part in ("--set", each)]
    module = ["-m", "pipelines.training", "--recipe", "debug", "--workspace", str(workspace)]
    start = [Path(sys.prefix) / "bin" / "torchrun", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [*start, *module, *sets],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PENSTOCK_HOME": str(workspace.parent / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(processes: int, workspace: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    process = begin(processes, workspace, *overrides)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def history(workspace: Path) -> list[dict[str, Any]]:
    text = (workspace / "outputs" / "train" / "history.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_fewer_processes_go_on_with_the_same_batches(tmp_path: Path) -> None:
    whole = train(1, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    cut = tmp_path / "cut"
    begun = train(2, cut, "train.max_seconds=0.001")
    assert begun.returncode == 0, begun.stderr
    _, second = history(cut)
    assert second["step"] == 2  # the processes hear of it one step later
    (cut / "outputs" / "train" / "record.json").unlink()  # as if it had been stopped
    rest = train(1, cut)
    assert rest.returncode == 0, rest.stderr
    assert "resumed after step 2" in rest.stderr
    for found, expected in zip(history(cut), history(tmp_path / "whole"), strict=True):
        assert found.pop("samples") == expected.pop("samples")
        assert found == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / "home" / "services").exists()


@pytest.mark.parity
def test_sigterm_to_torchrun_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    long = ["train.steps=120", "train.log_every=5", "train.checkpoint_every=1000"]
    whole = train(2, tmp_path / "whole", *long)
    assert whole.returncode == 0, whole.stderr
    told = tmp_path / "told"
    process = begin(2, told, *long)
    curve = told / "checkpoints" / "history.jsonl"
    while process.poll() is None and not (curve.is_file() and curve.read_text().count("\n") > 3):
        time.sleep(0.02)
    began = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < limit(30)
    assert process.returncode != 0
    assert "s; the run goes on after step" in errors
    (saved,) = (told / "checkpoints").glob("step-*/COMPLETE")
    rest = train(2, told, *long)
    assert rest.returncode == 0, rest.stderr
    assert TrainRecord.read(told) == TrainRecord.read(tmp_path / "whole")
    assert history(told) == history(tmp_path / "whole")
    entries = read_logbook(told)
    assert [entry.kind for entry in entries] == ["start", "preemption", "resume", "end"]
    assert entries[1].step == entries[2].step == int(saved.parent.name[5:])


def test_a_users_error_is_one_line_of_one_process(tmp_path: Path) -> None:
    failed = train(2, tmp_path / "w", "parallel.tp=3")
    assert failed.returncode != 0
    assert failed.stderr.count("tp(3) = 3 processes, but there are 2") == 1

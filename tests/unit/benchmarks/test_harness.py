import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.run.records import Split
from pipelines.training.checkpoint.store import CheckpointStore
from tests.benchmarks import contender, harness
from tests.benchmarks.__main__ import device
from tests.benchmarks.contenders import gpu_readers_ours, train_ours
from tests.benchmarks.harness import (
    Benchmark,
    Contender,
    Demand,
    Limit,
    kept_limits,
    ratios,
    run_case,
)
from tests.benchmarks.loader import write_shard

ROUND = """
import threading, time
from tests.benchmarks.contender import serve

count = 0

def work_ahead():
    global count
    while True:
        time.sleep(0.001)
        count += 1

def prepare(folder, options):
    print("a library's chatter")
    threading.Thread(target=work_ahead, daemon=True).start()
    def round():
        before = count
        time.sleep(options["seconds"])
        further = {"before": before, "nap": options["seconds"]}
        return 10.0, further | {"seen": (folder / "data").read_text()}
    return round

serve(prepare)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "tests" / "benchmarks"
    (folder / "contenders").mkdir(parents=True)
    for package in (folder.parent, folder, folder / "contenders"):
        (package / "__init__.py").touch()
    (folder / "contenders" / "waiter.py").write_text(ROUND)
    shutil.copy(contender.__file__, folder)
    (tmp_path / "data").write_text("words")
    monkeypatch.setattr(harness, "PROJECT", tmp_path)
    return tmp_path


def benchmark(*demands: Demand, **options: Any) -> Benchmark:
    return Benchmark(
        name="waiting",
        unit="naps",
        contenders=[
            Contender("penstock", "waiter", options={"seconds": 0.02}),
            Contender("slow", "waiter", options={"seconds": 0.2}),
        ],
        demands=list(demands),
        make_data=lambda folder: {},
        **options,
    )


def test_the_faster_one_has_the_higher_ratio_pair_by_pair(project):
    reached, missed = Demand("slow", 3.0), Demand("slow", 50.0)
    bench = benchmark(reached, missed)
    figures = run_case(bench, project, {}, pairs=3, told=lambda line: None)
    assert len(figures["penstock"].values) == 3
    assert figures["slow"].rounds[-1]["seen"] == "words"
    found = list(ratios(bench, "", figures))
    assert [each["reached"] for each in found] == [True, False]
    assert found[0]["min"] <= found[0]["median"] <= found[0]["max"]


def test_seconds_are_the_better_the_fewer_and_may_have_a_limit(project):
    demands = Demand("slow", 0.3), Demand("slow", 0.01)
    limits = [Limit("median", 10), Limit("median", 0.001), Limit("before", 1e9, of="slow")]
    bench = benchmark(*demands, measures="seconds", limits=limits)
    figures = run_case(bench, project, {}, pairs=3, told=lambda line: None)
    assert 0.002 <= figures["penstock"].summary()["median"] < 0.02  # of ten units a round
    assert [each["reached"] for each in ratios(bench, "", figures)] == [True, False]
    assert [each["reached"] for each in kept_limits(bench, figures)] == [True, False, True]


def test_a_further_figure_is_compared_pair_by_pair_and_is_seconds(project):
    demands = Demand("slow", 0.3, figure="nap"), Demand("slow", 0.01, figure="nap")
    bench = benchmark(*demands)
    figures = run_case(bench, project, {}, pairs=3, told=lambda line: None)
    found = list(ratios(bench, "", figures))
    assert [each["pairs"] for each in found] == [pytest.approx([0.1] * 3)] * 2
    assert [(each["figure"], each["reached"]) for each in found] == [("nap", True), ("nap", False)]


def test_a_contender_is_stopped_while_another_does_its_round(project):
    figures = run_case(benchmark(), project, {}, pairs=3, told=lambda line: None)
    # Four rounds of 0.2 s by the other one would have let its thread count some 800 on.
    assert figures["penstock"].rounds[-1]["before"] < 300


def test_a_contender_that_breaks_ends_the_benchmark_by_name(project):
    (project / "data").unlink()
    with pytest.raises(SystemExit, match="slow ended with code 1"):
        run_case(benchmark(), project, {}, pairs=1, told=lambda line: None)


def test_without_our_environment_the_running_python_is_ours(project, monkeypatch):
    gone = {"ours": project / ".venv", "bench": project / ".venv-bench"}
    monkeypatch.setattr(harness, "VENVS", gone)
    assert harness._python(Contender("penstock", "waiter")) == sys.executable
    with pytest.raises(SystemExit, match=r"peer needs \.venv-bench: make bench-env"):
        harness._python(Contender("peer", "waiter", venv="bench"))


def test_a_round_of_training_saves_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(CheckpointStore, "complete", lambda _, step, facts: saved.append(step))
    shard = write_shard(tmp_path / "train-00000", np.arange(2000, dtype=np.uint16) % 64)
    split = Split(documents=1, bytes=2000, tokens=2000, shards=(shard,))
    sizes = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 16}
    train = {"steps": 2, "warmup_steps": 1, "micro_batch_size": 1, "global_batch_size": 1}
    run_round = train_ours.prepare(
        tmp_path,
        {
            "split": split.model_dump(mode="json"),
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "shape": sizes | {"vocab_size": 64, "context_length": 16},
            "train": train | {"log_every": 1, "checkpoint_every": 1},
            "compile": False,
            "name": "tiny",
        },
    )
    tokens, _ = run_round()
    assert tokens == 2 * 16
    assert saved == []
    assert not (tmp_path / "ours-tiny").exists()


def test_the_results_name_the_gpu(tmp_path, monkeypatch):
    told = "NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, 700.00 W, 1980 MHz"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\necho "{told}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = device()
    assert found["torch"] == torch.__version__
    assert found["gpus"] == [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "driver_version": "580.65.06",
            "memory.total": "81559 MiB",
            "power.limit": "700.00 W",
            "clocks.max.sm": "1980 MHz",
        }
    ]


def test_gpudirect_that_is_not_to_be_had_ends_with_the_reason(tmp_path: Path):
    (tmp_path / "weights").write_bytes(bytes(4096))
    sizes = {"bytes": 4096, "tensor_bytes": 4096}
    options = {"file": "weights", "reader": "gds", "device": "cpu", **sizes}
    with pytest.raises(SystemExit, match=r"^gds: "):
        gpu_readers_ours.prepare(tmp_path, options)

"""The acceptance's whole flow without a GPU, in an environment that lacks all that it may lack."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from pipelines.core.errors import UserError
from pipelines.planning.hardware_table import named as named_gpu
from tests.benchmarks.__main__ import RESULTS
from tests.benchmarks.gpu_lora import LORA
from tests.benchmarks.harness import PROJECT
from tests.gpu_acceptance import peak_memory, same_numbers, training_speed
from tests.gpu_acceptance.acceptance_parts import MOST_SECONDS, PARTS, WHEELS, Place, named
from tests.gpu_acceptance.flow import ENDED, Flow, identity
from tests.gpu_acceptance.result_table import accepted, table
from tests.gpu_acceptance.step_trace import overlap

PLANTED = "tests.integration.planted_acceptance"
PATIENCE = 1800  # seconds; a minute and a half on a machine with nothing else to do


def needed(*names: str) -> dict[str, Distribution]:
    """These packages and all that they require here."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # what only another build of torch has
            continue
        if package.name in found:
            continue
        found[package.name] = package
        wanted = map(Requirement, package.requires or ())
        waiting += [
            each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment of torch, transformers, the stated wheels and what these need."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in needed("torch", "transformers", *WHEELS).values():
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return folder / "bin" / "python"


def start(python: Path, out: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        [python, "-m", "tests.gpu_acceptance", "--fake", "--out", out],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("gpu-*.json")}


def until(happened: "Iterator[bool]") -> None:
    ends = time.monotonic() + PATIENCE / 2
    while not next(happened):
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_a_killed_acceptance_goes_on_and_ends_well(bare: Path, tmp_path: Path) -> None:
    before = results(RESULTS)
    first = start(bare, tmp_path)
    until(len(results(tmp_path)) >= 2 for _ in iter(int, 1))
    until(bool(psutil.Process(first.pid).children()) for _ in iter(int, 1))
    running = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert psutil.wait_procs(running, timeout=60)[1] == []  # nobody holds the GPU

    kept = results(tmp_path)
    assert all(json.loads(content)["state"] in ENDED for content in kept.values())
    output, errors = (second := start(bare, tmp_path)).communicate()
    assert second.returncode == 0, output + errors
    assert set(re.findall(r"(\S+): kept", errors)) == {
        name.removeprefix("gpu-").removesuffix(".json") for name in kept
    }
    found = results(tmp_path)
    assert found.keys() == {f"gpu-{part.name}.json" for part in PARTS}
    assert {name: found[name] for name in kept} == kept
    assert all(json.loads(each)["device"].startswith("FAKE") for each in found.values())
    assert output.count("FAKE") == 2
    assert results(RESULTS) == before


@pytest.mark.timeout(PATIENCE)
def test_a_wrong_loss_is_not_accepted(tmp_path: Path) -> None:
    flow = Flow(tmp_path, fake=True, told=lambda line: None, module=PLANTED)
    (found,) = flow.run([named("losses")])
    assert (found["state"], found["must"]) == ("missed", True)
    assert found["figure"] > 1e-4
    assert not accepted([found])


def test_parts_that_fail_or_hang_say_so_and_the_others_go_on(tmp_path: Path) -> None:
    flow = Flow(tmp_path, fake=True, told=lambda line: None, module=PLANTED)
    hanging = replace(named("device"), seconds=0.1)
    found = flow.run([hanging, named("readers"), named("trace")])
    assert [(each["state"], each["limits"]) for each in found] == [
        ("out of time", "over 2 s"),
        ("failed", "OSError: the drive is gone"),
        ("failed", "ended by SIGSEGV"),
    ]
    assert not accepted(found)
    assert "the drive is gone" in table(found)
    assert len({json.dumps(each) for each in flow.run([named("readers")])}) == 1  # not kept


def test_results_of_other_code_are_not_kept(tmp_path: Path) -> None:
    told: list[str] = []
    flow = Flow(tmp_path, fake=True, told=told.append, module=PLANTED)
    (found,) = flow.run([named("readers")])
    whole = found | {"state": "reached"}
    for changed in ({}, {"code": "other"}, {"device": "other"}, {"commit": "other"}):
        flow.path(named("readers")).write_text(json.dumps(whole | changed))
        flow.run([named("readers")])
    flow.path(named("readers")).write_text(json.dumps(whole)[:-9])  # not whole
    flow.run([named("readers")])
    assert [line for line in told if "kept" in line] == ["readers: kept from an earlier run"]


def test_fake_figures_never_lie_among_results() -> None:
    with pytest.raises(UserError, match="fake figures must not lie in"):
        Flow(RESULTS, fake=True, told=print).run(PARTS)


def test_without_a_gpu_it_says_what_to_do_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, "-m", "tests.gpu_acceptance", "--out", tmp_path]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "gpu-acceptance: nvidia-smi names no GPU; --fake tries all without one"
    ]


def test_a_machine_without_git_has_results_of_its_code(tmp_path: Path, monkeypatch) -> None:
    known = identity([])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert identity([]) == known | {"commit": "unknown"}


def test_on_one_gpu_it_takes_nine_minutes_at_most(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "tests.gpu_acceptance.flow.gpus", lambda: [{"name": "a GPU", "driver_version": "1"}]
    )
    flow = Flow(tmp_path, fake=False, told=lambda line: None, module=PLANTED, most_seconds=2)
    first, second = flow.run([named("device"), named("trace")])
    assert (first["state"], first["limits"]) == ("out of time", "over 2 s; run it again")
    assert (second["state"], second["limits"]) == ("out of time", "over 0 s; run it again")
    assert MOST_SECONDS == 540


def test_a_part_may_start_workers_that_close_their_stdin(tmp_path: Path) -> None:
    flow = Flow(tmp_path, fake=True, told=lambda line: None, module=PLANTED)
    (found,) = flow.run([replace(named("fp8"), seconds=5)])
    assert found["state"] == "reached"


def test_the_docs_name_each_wheel() -> None:
    page = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")
    assert set(WHEELS) <= set(re.findall(r"`([a-z-]+) [\d.]+`", page))


def test_the_docs_say_what_the_planner_expects() -> None:
    page = " ".join((PROJECT / "docs" / "training.md").read_text(encoding="utf-8").split())
    place = Place(Path(), "cuda:0", fake=False)

    def rate(case: dict, adapter: dict | None = None, **train: str) -> float:
        work = training_speed.sized(place, case, 6, **train)
        return training_speed.planned(named_gpu("h100"), work, adapter or {})["tokens_per_second"]

    fp8, bf16 = (rate(training_speed.WIDE, precision=each) for each in ("fp8", "bf16"))
    expected = {
        "482,000 tokens/s of GPT-2": rate(training_speed.GPT2),
        "70,300 of 1B": rate(training_speed.LLAMA),
        "15,200 of LoRA on 8B": rate(training_speed.LLAMA_8B_KEPT, LORA),
        "1.17 of bf16's speed in fp8": fp8 / bf16,
    }
    for words, value in expected.items():
        assert words in page
        assert float(words.split()[0].replace(",", "")) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(("found", "reached"), [(1.00009, True), (0.99, False), (1e9, False)])
def test_losses_are_compared_step_by_step(found: float, reached: bool) -> None:
    outcome = same_numbers.compare([1.0, 2.0], [1.0, 2.0 * found])
    assert outcome.reached == reached
    assert outcome.limits == "step 2 of 2"


def test_a_loss_that_is_no_number_is_wrong() -> None:
    assert not same_numbers.compare([1.0, 2.0], [float("nan"), 2.0]).reached


@pytest.mark.parametrize(("measured", "reached"), [(107, True), (110, False), (92, False)])
def test_the_dry_run_may_be_off_by_eight_percent(measured: int, reached: bool) -> None:
    outcome = peak_memory.compare({"one": 100, "other": 100}, {"one": 100, "other": measured})
    assert outcome.reached == reached


def test_each_configuration_is_predicted() -> None:
    predicted = json.loads(peak_memory.PREDICTED.read_text())
    assert predicted.keys() == peak_memory.CONFIGURATIONS.keys()
    assert len(predicted) == 8


@pytest.mark.parity
@pytest.mark.parametrize("name", peak_memory.CONFIGURATIONS)
def test_the_dry_run_still_predicts_the_same(name: str) -> None:
    predicted = json.loads(peak_memory.PREDICTED.read_text())
    assert peak_memory.tried(peak_memory.CONFIGURATIONS[name]) == predicted[name]


def test_overlap_comes_from_the_spans_of_a_trace() -> None:
    def event(kind: str, name: str, start: float, end: float) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start}

    events = [
        event("kernel", "gemm", 0, 40),
        event("gpu_memcpy", "Memcpy HtoD", 30, 50),
        event("kernel", "ncclDevKernel_AllReduce", 50, 60),
        event("kernel", "gemm", 80, 100),
        event("cpu_op", "aten::mm", 0, 100),
        {"ph": "M", "name": "process_name"},
    ]
    outcome = overlap(events, ("kernel", "gpu_memcpy"))
    assert outcome.figure == pytest.approx(0.8)
    assert outcome.detail["copies_alone"] == pytest.approx(0.1)
    assert outcome.detail["communication_alone"] == pytest.approx(0.1)
    assert not outcome.reached

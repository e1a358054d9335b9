import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.planning.roofs import flops_per_token
from pipelines.training.machine_report import hardware_of, machine_report, summary
from pipelines.training.metrics import StepMetrics
from pipelines.training.metrics import summary as run_summary

CPU = torch.device("cpu")


def test_a_cpu_is_measured_once_and_says_so() -> None:
    hardware = hardware_of(CPU, "fp32")
    assert hardware.name.startswith("measured 1-thread float32 matrix product, ")
    assert 1e8 < hardware.peak("fp32") < 1e14
    assert 1e7 < hardware.memory_bandwidth < 1e13
    assert hardware_of(CPU, "fp32") is hardware


def test_a_point_holds_shares_of_the_roofs(start: Callable) -> None:
    run = start(log_every=10, checkpoint_every=100)
    run.trainer.fit()
    (point,) = run.points
    flops = flops_per_token(run.model.config, 16) * run.trainer.loader.tokens_per_step
    peak = run.trainer.meter.hardware.peak("fp32")
    assert point.mfu == pytest.approx(flops / peak / point.step_seconds)
    assert point.mbu > 0
    assert 0 <= point.data_wait_share < 1
    assert point.communication_share == 0.0
    assert point.memory_bytes is not None
    held = 3 * 4 * sum(each.numel() for each in run.trainer.parameters)  # with both moments
    assert held * 4 / 3 < point.memory_bytes < 100 * held  # gradients too, but not all of torch
    assert point.bound_by in ("compute", "CPU memory", "storage", "host")


def test_what_depends_on_the_machine_is_not_in_the_history(start: Callable) -> None:
    run = start()
    run.trainer.fit()
    assert set(run.points[0].curve_point()) == {
        "step",
        "tokens",
        "loss",
        "learning_rate",
        "gradient_norm",
        "steps_left_out",
        "samples",
    }


def test_waiting_for_data_is_measured(start: Callable) -> None:
    run = start(log_every=10, checkpoint_every=100)
    micro_batches = run.trainer.loader.micro_batches

    def slow(step: int):
        for item in micro_batches(step):
            time.sleep(0.2)
            yield item

    run.trainer.loader.micro_batches = slow
    run.trainer.fit()
    assert run.points[-1].data_wait_share > 0.5
    assert run.points[-1].bound_by == "storage"
    assert run.points[-1].step_seconds > 0.6  # three micro-batches


def test_a_runs_summary_takes_what_bound_it_most() -> None:
    point = StepMetrics(
        step=1,
        last_step=1,
        tokens=1,
        loss=1.0,
        learning_rate=1.0,
        gradient_norm=1.0,
        steps_left_out=0,
        samples="",
        step_seconds=1.0,
        tokens_per_second=1000.0,
        mfu=0.6,
        mbu=0.1,
        data_wait_share=0.0,
        communication_share=None,
        memory_bytes=1,
        bound_by="compute",
        bound_share=0.6,
        last=False,
    )
    slow = replace(point, bound_by="storage", bound_share=0.9, mfu=0.01)
    bound, line = run_summary([slow, point, point])
    assert bound == "compute at 60.0% of its roof"
    assert "1,000 tokens/s, MFU 60.0%" in line
    idle = replace(point, bound_by="host", bound_share=0.7, mfu=0.2)
    assert idle.line().endswith("bound by host for 70.0% of a step, idle device included")
    assert "communicates (not measured yet)" in point.line()
    assert "train/communication_share" not in point.curves()


def test_the_machine_in_one_line_and_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    mesh = build_mesh(Layout(), CPU)
    facts = machine_report(mesh, hardware_of(CPU, "fp32"))
    assert facts["settings"]["NCCL_DEBUG"] == "WARN"
    assert "SOME_TOKEN" not in str(facts)
    line = summary(facts)
    assert f"torch {torch.__version__}, backend none; MFU of measured 1-thread" in line
    assert "NCCL_DEBUG=WARN" in line

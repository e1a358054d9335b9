from collections.abc import Callable

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.recipe.training_section import Fp8Scaling, Train
from pipelines.training.checkpoint.checkpointer import Position
from pipelines.training.precision import LossScale, set_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "line"),
    [
        ("tf32", r"train\.precision = tf32: .* capability 8\.0 .* has cpu; set fp32 or bf16"),
        ("fp8", r"train\.precision = fp8: .* capability 8\.9 .* has cpu; set bf16"),
    ],
)
def test_what_a_device_cannot_do_is_one_line(precision: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        set_precision(Train(precision=precision), CPU)


@pytest.mark.parametrize(
    ("scaling", "needed", "has", "name"),
    [("rowwise", "9.0", (8, 9), "NVIDIA L40S"), ("mx", "10.0", (9, 0), "NVIDIA H100")],
)
def test_more_scales_need_a_later_gpu(
    scaling: Fp8Scaling,
    needed: str,
    has: tuple[int, int],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    train = Train(precision="fp8", fp8_scaling=scaling)
    line = rf"train\.fp8_scaling = {scaling}: .* {needed} or later, .* has {name}; set tensorwise"
    with pytest.raises(UserError, match=line):
        set_precision(train, torch.device("cuda", 0))


def test_the_scale_halves_after_an_overflow_and_doubles_after_a_while() -> None:
    scale = LossScale("fp16", CPU)
    scale.interval = 3
    fine, overflow = torch.tensor(1.0), torch.tensor(float("inf"))
    scales = []
    for norm in (fine, overflow, fine, fine, fine, fine, overflow):
        scale.update(norm)
        scales.append(float(scale.scale) / 2**15)
    assert scales == [2, 1, 1, 1, 2, 2, 1]
    again = LossScale("fp16", CPU)
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == {"scale": 2.0**15, "steps": 0}


def test_only_fp16_is_scaled() -> None:
    scale = LossScale("bf16", CPU)
    scale.update(torch.tensor(float("inf")))
    assert scale.state_dict() == {"scale": 1.0, "steps": 0}


def test_fp16_trains_and_resumes_bit_identically(start: Callable) -> None:
    whole = start("whole", steps=30, lr=0.01, precision="fp16")
    whole.trainer.fit()
    assert whole.points[-1].loss < whole.points[0].loss - 0.3
    assert float(whole.trainer.scale.scale) == 2.0**16
    again = start("whole", steps=30, lr=0.01, precision="fp16")
    again.trainer.fit()
    assert again.trainer.scale.state_dict() == {"scale": 2.0**16, "steps": 30}


def test_a_step_that_overflows_is_left_out(start: Callable) -> None:
    run = start(steps=4, precision="fp16")
    run.trainer.scale.scale.fill_(2.0**40)
    before = {name: each.clone() for name, each in run.model.state_dict().items()}
    with run.trainer.watchdog:
        run.trainer._step(Position())
    assert float(run.trainer.scale.scale) == 2.0**39
    assert all(torch.equal(each, before[name]) for name, each in run.model.state_dict().items())


def test_fp32_on_the_cpu_rounds_no_factor() -> None:
    set_precision(Train(precision="fp32"), CPU)
    torch.manual_seed(0)
    x, weight = torch.randn(512, 256), torch.randn(256, 300)
    # Factors of half the digits would be a thousand times as far off.
    torch.testing.assert_close(
        (x @ weight).double(), x.double() @ weight.double(), atol=2e-4, rtol=0
    )


def test_what_compile_asks_for_can_be_answered_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    before = torch.get_float32_matmul_precision()
    try:
        set_precision(Train(precision="tf32"), torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)

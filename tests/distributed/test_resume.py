"""A run that was stopped goes on as if it had not been, on any layout.

On its own layout to the bit; on another one with the same samples, and with losses that differ by
no more than the order of sums makes them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipelines.models.config import Yarn
from pipelines.models.families import flags
from pipelines.run.records import Split
from pipelines.training.checkpoint.state import state_of
from pipelines.training.metrics import StepMetrics
from pipelines.training.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import CASES
from tests.distributed.training import Case, build_trainer, make_data, small

STEPS = 6
IN_MAKE_TEST = "zero-3"
FURTHER = [
    Case("ddp-bf16-sums", 2, {"reduce_dtype": "bf16"}),
    Case("zero-3-bf16-sums", 2, {"sharding": "full", "reduce_dtype": "bf16"}),
    Case("zero-1-paged", 2, {"sharding": "optimizer", "paged_moments": True}),
    Case("zero-3-paged", 2, {"sharding": "full", "paged_moments": True}),
    Case("zero-3-8-bits", 2, {"sharding": "full"}, {"optimizer": "adamw_8bit"}),
    *(
        Case(f"zero-3-fp8-{each}", 2, {"sharding": "full"}, {"precision": "fp8", "optimizer": each})
        for each in ("adamw", "adamw_8bit", "muon")
    ),
    Case(
        "zero-3-mx",
        2,
        {"sharding": "full"},
        {"precision": "fp8", "fp8_scaling": "mx", "micro_batch_size": 2},
    ),
]
KINDS = ("optimizer", "precision", "fp8_scaling")

WHOLE_BLOCKS = {"width": 128, "hidden": 128}  # of 8-bit moments, with two processes to a row

Data = tuple[Path, Split]
Samples = list[tuple[int, ...]]  # the tokens of each


def layouts() -> list[object]:
    """Each layout once; all but one are part of the proof only."""
    every = reversed([*CASES, *map(small, FURTHER)])
    found = {
        (
            *sorted(case.parallel.items()),
            case.world,
            *map(case.train.get, KINDS),
            "sigmoid_router" in case.model,
        ): case
        for case in every
    }
    return [
        pytest.param(
            case, id=case.name, marks=[] if case.name == IN_MAKE_TEST else [pytest.mark.parity]
        )
        for case in reversed(found.values())
        if case.world <= 4
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("data")
    return folder, make_data(folder)


def run(
    case: Case, data: Data, folder: Path, cut: int | None = None
) -> tuple[Trainer, list[StepMetrics], dict[int, Samples]]:
    """Train to the end, or until step `cut` is told; also this process's samples of each step."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, folder, points, torch.float32)
    samples: dict[int, Samples] = {}
    micro_batches = trainer.loader.micro_batches

    def noted(step: int) -> Any:
        samples[step] = []
        for batch, last in micro_batches(step):
            samples[step] += map(tuple, batch.inputs_BS.tolist())
            yield batch, last

    trainer.loader.micro_batches = noted

    def stop(point: StepMetrics) -> None:
        points.append(point)
        if point.step == cut:
            raise InterruptedError

    trainer.report = stop
    if cut is None:
        trainer.fit()
    else:
        with pytest.raises(InterruptedError):
            trainer.fit()
    return trainer, points, samples


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This process's weights and moments."""
    found = state_of(trainer.model, trainer.optimizer)
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).clone()
        for name, each in found.items()
    }


def resume(case: Case, data: Data, folder: Path, cut: int) -> None:
    """In each process: what goes on after a cut is, to the bit, what was never cut."""
    whole, whole_points, whole_samples = run(case, data, folder / "whole")
    _, _, before = run(case, data, folder / "cut", cut=cut + 1)
    again, points, samples = run(case, data, folder / "cut")
    assert [point.step for point in points] == list(range(cut + 1, STEPS + 1))
    assert [(p.loss, p.gradient_norm) for p in points] == [
        (p.loss, p.gradient_norm) for p in whole_points[cut:]
    ]
    assert {**before, **samples} == whole_samples
    ours, theirs = state(again), state(whole)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    following = [list(each.loader.micro_batches(STEPS)) for each in (again, whole)]
    for (one, _), (other, _) in zip(*following, strict=True):
        assert torch.equal(one.inputs_BS, other.inputs_BS)


@pytest.mark.parametrize("case", layouts())
def test_on_its_own_layout_to_the_bit(
    case: Case, data: Data, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    cut = random.Random(case.name).randrange(1, STEPS - 1)
    # Saved at the cut; the one step more that was done is lost.
    stopped = replace(case, train={**case.train, "steps": STEPS, "checkpoint_every": cut})
    pool(case.world).run(resume, stopped, data, tmp_path, cut)


def part(
    case: Case, data: Data, folder: Path, cut: int | None
) -> tuple[list[tuple[int, float]], dict[int, Samples]]:
    """Losses of the steps that are done now, and this process's samples of them."""
    _, points, samples = run(case, data, folder, cut)
    return [(point.step, point.loss) for point in points], samples


ALONE = Case("alone", 1, {})
EXPERTS = {"experts": 8, "experts_per_token": 2}
GPT_OSS = flags("gpt_oss") | EXPERTS | {"kv_heads": 2, "rope_scaling": Yarn(4.0, 8)}
ZERO_3 = {"sharding": "full"}
CHAINS = {
    "zero-1 to ddp to one": [
        Case("zero-1", 2, {"sharding": "optimizer"}),
        Case("ddp", 2, {}),
        ALONE,
    ],
    "fsdp-4 to tp-2-fsdp-2 to one": [
        Case("fsdp-4", 4, ZERO_3),
        Case("tp-fsdp", 4, {**ZERO_3, "tp": 2, "dp_shard": 2}),
        ALONE,
    ],
    "cp-2-fsdp-2 to tp-2 to cp-2": [
        Case("cp-fsdp", 4, {**ZERO_3, "cp": 2}),
        Case("tp", 2, {"tp": 2}),
        Case("cp", 2, {"cp": 2}),
    ],
    "ep-4 to one to ep-2-tp-2": [
        Case("ep-4", 4, {**ZERO_3, "ep": 4}, model=EXPERTS),
        replace(ALONE, model=EXPERTS),
        Case("ep-tp", 4, {**ZERO_3, "ep": 2, "tp": 2}, model=EXPERTS),
    ],
    "gpt-oss, ep-2-tp-2-fsdp-2 to one to fsdp-2": [
        Case("ep-tp-fsdp", 8, {**ZERO_3, "ep": 2, "tp": 2}, model=GPT_OSS),
        Case("one", 1, {}, model=GPT_OSS),
        Case("fsdp-2", 2, ZERO_3, model=GPT_OSS),
    ],
    "one to pp-2 to fsdp-2": [ALONE, Case("pp", 2, {"pp": 2}), Case("fsdp-2", 2, ZERO_3)],
    "pp-2-fsdp-2 to tp-2 to zero-1": [
        Case("pp-fsdp", 4, {**ZERO_3, "pp": 2, "dp_shard": 2}),
        Case("tp", 2, {"tp": 2}),
        Case("zero-1", 2, {"sharding": "optimizer"}),
    ],
}


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_on_another_layout_with_the_same_samples_and_losses(
    chain: list[Case], optimizer: str, data: Data, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    every = STEPS // len(chain)
    train = {
        "steps": STEPS,
        "checkpoint_every": every,
        "micro_batch_size": 2,
        "optimizer": optimizer,
    }
    model = {**chain[0].model, **(WHOLE_BLOCKS if optimizer == "adamw_8bit" else {})}
    assert not dist.is_initialized()
    expected, expected_samples = part(
        replace(ALONE, train=train, model=model), data, tmp_path / "whole", None
    )
    done: list[tuple[int, float]] = []
    for number, layout in enumerate(chain, 1):
        case = replace(layout, train=train, model=model)
        cut = None if number == len(chain) else number * every + 1
        arguments = (case, data, tmp_path / "chain", cut)
        found = [part(*arguments)] if case.world == 1 else pool(case.world).run(part, *arguments)
        losses = [each for each, _ in found]
        assert all(each == losses[0] for each in losses)
        assert losses[0][0][0] == (number - 1) * every + 1  # it went on there
        done = [point for point in done if point[0] < losses[0][0][0]] + losses[0]
        for step in found[0][1]:
            seen = {sample for _, samples in found for sample in samples[step]}
            assert seen == set(expected_samples[step])
    assert [step for step, _ in done] == list(range(1, STEPS + 1))
    exact = 1e-5 if optimizer == "adamw" else 1e-3  # where a moment lies between two codes
    assert done == [(step, pytest.approx(loss, rel=exact)) for step, loss in expected]

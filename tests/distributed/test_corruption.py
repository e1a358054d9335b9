"""Real processes, one of which gets a bit wrong: it is found, and the run ends as a clean one."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipelines.core.errors import SharedError
from pipelines.models.weights import local
from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from tests.compiling import needs_a_linker
from tests.distributed.pool import Pool
from tests.distributed.training import Case, build_trainer
from tests.unit.training.conftest import Noted

EVERY = 4  # so that the steps 3, 7, 11 … are checked
NEVER = 10**9
WRONG = 1  # the rank that has the flipped bit
SETTINGS = {"steps": 12, "checkpoint_every": 5, "micro_batch_size": 1}
TWO_LAYERS = {"layers": 2}
EXPERTS = {"experts": 4, "experts_per_token": 2, "layers": 2}
FULL = {"sharding": "full"}
DDP = Case("ddp", 2, {}, SETTINGS, model=TWO_LAYERS, documents=True)
# Three processes divide a batch of eight unevenly, and one runs a micro-batch without targets.
THREE = Case("three", 3, {}, SETTINGS, model=TWO_LAYERS, documents=True)
ONCE = Case("one-micro-batch", 2, {}, SETTINGS | {"micro_batch_size": 4}, model=TWO_LAYERS)
ZERO_3 = Case("zero-3", 2, FULL, SETTINGS, model=TWO_LAYERS)
OTHERS = [
    ONCE,
    ZERO_3,
    Case("zero-1", 2, {"sharding": "optimizer"}, SETTINGS, model=TWO_LAYERS),
    Case("bf16", 2, {}, SETTINGS | {"precision": "bf16"}, model=TWO_LAYERS),
    Case("again", 2, {}, SETTINGS | {"activation_checkpoint": "full"}, model=TWO_LAYERS),
    Case("compiled", 2, {}, SETTINGS | {"compile": True}, model=TWO_LAYERS),
    Case("compiled-zero-3", 2, FULL, SETTINGS | {"compile": True}, model=TWO_LAYERS),
    Case("experts", 2, {}, SETTINGS, model=EXPERTS),
    Case("experts-zero-3", 2, FULL, SETTINGS, model=EXPERTS),
    Case("hybrid", 4, FULL | {"dp_shard": 2}, SETTINGS, model=TWO_LAYERS),
]
TOGETHER = [
    Case("tensor", 4, {"tp": 2}, SETTINGS, model=TWO_LAYERS),
    Case("context", 4, {"cp": 2}, SETTINGS, model=TWO_LAYERS),
]


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped in a process, in some steps.

    Attributes:
        call: In which forward pass of such a step, or in the backward pass after it. The first one
            of a step that is checked is of another process's micro-batch.
        always: In all passes from the first of these steps on.
    """

    kind: Literal["gradient", "activation", "weight", "moment"]
    steps: tuple[int, ...] = (7,)
    call: int = 1
    always: bool = False


class Outcome(NamedTuple):
    """Of one process."""

    curve: list[tuple[int, float, float]]
    weights: str  # a hash
    notes: list[dict[str, Any]]
    error: str


def flip(tensor: Tensor) -> Tensor:
    """The tensor, with a flipped bit in its first number."""
    first = local(tensor).detach().view(-1)[:1]
    integer = {2: torch.int16, 4: torch.int32}[first.element_size()]
    first.view(integer).bitwise_xor_(1 << (8 * first.element_size() - 4))
    return tensor


class Planted(Noted):
    """Knows the step, and flips the bit when it is time; the passes depend on random numbers."""

    def __init__(self, trainer: Any, planted: Flip | None) -> None:
        super().__init__()
        self.trainer, self.planted = trainer, planted
        self.now = self.calls = 0
        self.done: set[int] = set()
        (part,) = trainer.model.modules
        if "1" in part.layers:  # a pipeline's second stage has others
            part.layers["1"].register_forward_pre_hook(self.forward)
        if planted is not None and planted.kind == "gradient":
            part.norm.weight.register_hook(lambda each: flip(each) if self.is_time() else each)

    def is_time(self) -> bool:
        planted = self.planted
        if planted is None or (self.calls != planted.call and not planted.always):
            return False
        return self.now >= planted.steps[0] if planted.always else self.now in planted.steps

    def before_step(self, step: int) -> None:
        self.now, self.calls = step, 0
        planted = self.planted
        if planted is None or step not in planted.steps or step in self.done:
            return
        self.done.add(step)  # it is not there again when the step is taken again
        weight = self.trainer.parameters[0]
        if planted.kind == "weight":
            flip(weight)
        if planted.kind == "moment":
            flip(self.trainer.optimizer.state[weight]["exp_avg"])

    def forward(self, _module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        x = F.dropout(inputs[0], 0.1)
        if self.planted is not None and self.planted.kind == "activation" and self.is_time():
            x = flip(x.clone())
        return (x, *inputs[1:])


def train(
    case: Case, data: tuple[Path, Split], folder: Path, every: int, planted: Flip | None = None
) -> Outcome:
    """What becomes of a run in which a rank may flip a bit."""
    points: list[StepMetrics] = []
    trainer = build_trainer(case, data, folder, points, torch.float32)
    trainer.corruption.every = every
    is_wrong = not dist.is_initialized() or dist.get_rank() == WRONG
    noted = Planted(trainer, planted if is_wrong else None)
    trainer.events = trainer.corruption._events = noted
    return finish(trainer, noted, points)


def finish(trainer: Any, noted: Noted, points: list[StepMetrics]) -> Outcome:
    """Train to the end."""
    error = ""
    try:
        trainer.fit()
    except SharedError as ended:
        error = str(ended)
    hashed = hashlib.sha256()
    for each in trainer.parameters:
        hashed.update(local(each.detach()).contiguous().view(torch.uint8).numpy().tobytes())
    curve = [(point.step, point.loss, point.gradient_norm) for point in points]
    notes = [one | {"kind": kind} for kind, one in zip(noted.kinds, noted.entries, strict=True)]
    return Outcome(curve, hashed.hexdigest(), notes, error)


@pytest.fixture
def run(
    pool: Callable[[int], Pool], data: tuple[Path, Split], tmp_path: Path
) -> Callable[..., list[Outcome]]:
    """Train over all processes of a case; each time in a folder of its own."""
    folders = iter(range(100))

    def of(case: Case, every: int = EVERY, planted: Flip | None = None) -> list[Outcome]:
        folder = tmp_path / str(next(folders))
        return pool(case.world).run(train, case, data, folder, every, planted)

    return of


@pytest.fixture
def clean(run: Callable[..., list[Outcome]]) -> Callable[[Case], list[Outcome]]:
    """Train without checks and without wrong bits, each case once."""

    def of(case: Case) -> list[Outcome]:
        if case.name not in CLEAN:
            CLEAN[case.name] = run(case, NEVER)
        return CLEAN[case.name]

    return of


CLEAN: dict[str, list[Outcome]] = {}


def are_same(found: list[Outcome], clean: list[Outcome]) -> bool:
    """Whether all processes ended in the same bits, of weights and of the curve."""
    pairs = zip(found, clean, strict=True)
    return all(
        one.weights == other.weights
        and {step: rest for step, *rest in one.curve} == {step: rest for step, *rest in other.curve}
        for one, other in pairs
    )


def ids(each: object) -> str:
    """Of a parameter."""
    if isinstance(each, Flip):
        return f"{each.kind}-{each.call}"
    return each.name if isinstance(each, Case) else str(each)


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Of the cases beside the first ones."""
    return [pytest.mark.parity, *([needs_a_linker] if "compile" in case.train else [])]


IN_PASSES = [Flip("activation"), Flip("activation", call=2), Flip("gradient", call=2)]
FOUND = [
    (DDP, Flip("activation", call=2)),
    (THREE, Flip("gradient")),
    *(
        pytest.param(case, each, marks=marks(case))
        for case in (DDP, THREE, *OTHERS)
        for each in IN_PASSES[: 3 if case.parallel == {} else 2]  # a shard's gradient is later
    ),
]


@pytest.mark.parametrize(("case", "planted"), FOUND, ids=ids)
def test_a_bit_that_is_computed_wrong_is_found_before_it_is_used(
    case: Case, planted: Flip, run: Callable, clean: Callable
) -> None:
    found = run(case, EVERY, planted)
    assert are_same(found, clean(case))
    what = "gradient" if planted.kind == "gradient" else "loss and gradient"
    for outcome in found:
        (note,) = outcome.notes
        assert (note["kind"], note["step"]) == ("corruption", 7)
        assert note["cause"].startswith(
            f"silent corruption at step 7: wrong bits in {what} of rank {WRONG} on "
        )
        assert " or " not in note["cause"]
        assert note["done"] == "the step was run again, and all agreed"
    # Without a check the bit would have gone into the weights.
    assert not are_same(run(case, NEVER, Flip(planted.kind)), clean(case))


@pytest.mark.parity
@pytest.mark.parametrize("case", TOGETHER, ids=ids)
def test_processes_that_compute_a_loss_together_are_named_together(
    case: Case, run: Callable, clean: Callable
) -> None:
    found = run(case, EVERY, Flip("activation"))
    assert are_same(found, clean(case))
    for outcome in found:
        (note,) = outcome.notes
        assert "of rank 0 on " in note["cause"]
        assert " and rank 1 on " in note["cause"]


LATER = pytest.param(DDP, "moment", marks=pytest.mark.parity)


@pytest.mark.parametrize(("case", "kind"), [(THREE, "weight"), (DDP, "weight"), LATER], ids=ids)
def test_a_bit_that_is_kept_wrong_is_found_and_the_run_goes_back(
    case: Case, kind: Any, run: Callable, clean: Callable
) -> None:
    # The checkpoints are of the steps 5 and 10: at the second one they differ, too.
    for every, step in ((EVERY, 7), (NEVER, 10)):
        found = run(case, every, Flip(kind, (6,)))
        assert are_same(found, clean(case))
        for outcome in found:
            (note,) = outcome.notes
            assert (note["kind"], note["step"]) == ("corruption", step)
            assert "wrong bits in weights" in note["cause"]
            assert ("rank 0 on " in note["cause"]) == (case is DDP)  # of two, nobody knows which
            assert f"rank {WRONG} on " in note["cause"]
            assert note["done"] == "went back to step 5"
            assert note["seconds_lost"] > 0


def test_a_wrong_bit_before_the_first_checkpoint_ends_the_run(run: Callable) -> None:
    for outcome in run(THREE, EVERY, Flip("weight", (2,))):
        assert "step 3: wrong bits in weights of rank 1 on " in outcome.error
        assert "start the run again" in outcome.error


@pytest.mark.parametrize("case", [DDP, THREE], ids=ids)
def test_hardware_that_is_always_wrong_ends_the_run(case: Case, run: Callable) -> None:
    for outcome in run(case, EVERY, Flip("activation", (5,), always=True)):
        assert "step 7: wrong bits in loss and gradient of rank " in outcome.error
        assert ("rank 0 on " in outcome.error) == (case is DDP)
        assert "rank 1 on " in outcome.error
        assert "keep this hardware out of the cluster" in outcome.error
        assert outcome.notes[-1]["done"] == "the run ended"


def test_hardware_that_is_wrong_twice_ends_the_run(run: Callable) -> None:
    for outcome in run(THREE, EVERY, Flip("activation", (7, 11))):
        assert [note["step"] for note in outcome.notes] == [7, 11]
        assert "step 11: wrong bits in loss and gradient of rank 1 on " in outcome.error
        assert ", and not for the first time; keep this hardware" in outcome.error


@pytest.mark.parity
@pytest.mark.parametrize("case", [DDP, THREE, ZERO_3], ids=ids)
def test_a_check_in_each_of_hundreds_of_steps_finds_nothing_and_changes_nothing(
    case: Case, run: Callable
) -> None:
    long = replace(case, train=SETTINGS | {"steps": 300, "checkpoint_every": 100})
    found = run(long, 1)
    assert [outcome.notes for outcome in found] == [[]] * case.world
    assert are_same(found, run(long, NEVER))


@pytest.mark.parity
def test_a_pipeline_trains_as_without_checks(run: Callable) -> None:
    case = Case("pipeline", 2, {"pp": 2}, SETTINGS)
    found = run(case, 1)
    assert not any(outcome.notes for outcome in found)
    assert are_same(found, run(case, NEVER))


def test_one_process_finds_what_it_gets_right_the_next_time(
    data: tuple[Path, Split], tmp_path: Path
) -> None:
    right = train(DDP, data, tmp_path / "right", NEVER)
    found = train(DDP, data, tmp_path / "found", EVERY, Flip("activation", call=2))
    (note,) = found.notes
    assert "wrong bits in loss and gradient of rank 0 on " in note["cause"]
    assert are_same([found], [right])


@pytest.mark.parametrize("repeats", [True, False])
def test_hardware_that_may_not_repeat_its_bits_is_tried_first(
    data: tuple[Path, Split], tmp_path: Path, caplog: pytest.LogCaptureFixture, *, repeats: bool
) -> None:
    points: list[StepMetrics] = []
    trainer = build_trainer(DDP, data, tmp_path / "tried", points, torch.float32)
    trainer.corruption.every, trainer.corruption._is_exact = EVERY, False
    trainer.corruption._repeats = None
    noted = Planted(trainer, Flip("activation", (11,), call=2))
    trainer.events = trainer.corruption._events = noted
    noise = torch.Generator()
    if not repeats:  # like a sum whose order is left to chance
        trainer.model.parameters()[0].register_hook(
            lambda each: each * (1 + 1e-7 * torch.rand((), generator=noise))
        )
    with caplog.at_level(logging.INFO):
        outcome = finish(trainer, noted, points)
    assert not outcome.error
    assert [note["step"] for note in outcome.notes] == ([11] if repeats else [])
    line = "they give other bits each time here; set train.deterministic = true"
    assert caplog.text.count(line) == (0 if repeats else 1)

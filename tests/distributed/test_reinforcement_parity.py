"""Under every layout a model samples, and learns from, the answers that one process does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipelines.core.errors import SharedError, UserError
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.answer_sampler import Sampler
from pipelines.reinforcement.prompts import Prompt
from pipelines.reinforcement.rollout_loader import InThisProcess, RolloutLoader
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from pipelines.training.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import FULL, marked
from tests.distributed.training import SHAPE, Case
from tests.settled import FP32

STEPS = 6
PROMPTS = [Prompt(number, [ord("0") + number, ord("?")], []) for number in range(8)]
REWARDS = [{"name": "exact_match"}]
_HALVES, _PAIRS = {"micro_batch_size": 4}, {"micro_batch_size": 2}


def case(name: str, world: int, parallel: dict, train: dict, **more: bool) -> Case:
    return Case(name, world, parallel, train, **more)


CASES = [
    case("ddp", 2, {}, _PAIRS),
    case("zero-1", 2, {"sharding": "optimizer"}, _PAIRS, slow=True),
    case("zero-3", 2, FULL, _PAIRS),
    case("tp", 2, {"tp": 2}, _HALVES),
    case("cp", 2, {"cp": 2}, _HALVES),
    case("1f1b", 2, {"pp": 2}, _PAIRS),
    case("ddp-uneven", 4, {}, {"micro_batch_size": 1}, slow=True),
    case("tp-fsdp", 4, FULL | {"tp": 2}, _PAIRS),
    case("cp-pp", 4, {"cp": 2, "pp": 2}, _PAIRS),
    case("pp-tp-fsdp", 8, FULL | {"pp": 2, "tp": 2}, _PAIRS),
]


def recipe_of(case: Case, *, alone: bool, **reinforcement: object) -> Recipe:
    train = FP32 | {
        "steps": STEPS,
        "warmup_steps": 2,
        "lr": 1e-2,
        "global_batch_size": 8,
        "log_every": 1,
        "checkpoint_every": 1000,
    }
    wanted = {"kind": "grpo", "answers": 4, "max_tokens": 6, "kl": 0.1, "rewards": REWARDS}
    return Recipe.model_validate(
        {
            "name": "case",
            "data": {"instruction": {"kind": "prompt_response"}, "sequence_length": 16},
            "model": {"init_from": "."},
            "train": train | dict(case.train),
            "parallel": {} if alone else case.parallel,
            "reinforcement": wanted | reinforcement,
        }
    )


def small_letters(prompt: str, answer: str, wanted: str) -> float:
    """A reward that a model of bytes can learn in a few steps."""
    del prompt, wanted
    return sum("a" <= letter <= "z" for letter in answer) / 6


def build(
    recipe: Recipe,
    tokenizer: Path,
    checkpoints: Path,
    dtype: torch.dtype,
    reward: Callable[[str, str, str], float] = small_letters,
) -> Trainer:
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), torch.device("cpu"))
    shape = DecoderConfig(**{**SHAPE, "vocab_size": 257})

    def sampled() -> Transformer:
        model = Transformer(shape).to(dtype)
        model.init_weights(recipe.seed)
        return model

    loader = RolloutLoader(recipe, PROMPTS, mesh)
    with torch.device("meta"):
        model = Transformer(shape).to(dtype)
    laid = parallelize(model, mesh, recipe, lambda part: part.init_weights(recipe.seed))
    sampler = Sampler(recipe, tokenizer, sampled, mesh.device)
    sampler._rewards = {"exact_match": reward}
    loader.begin(laid, InThisProcess(sampler) if mesh.rank == 0 else None, Events())
    points: list[StepMetrics] = []
    trainer = Trainer(recipe, laid, loader, points.append, checkpoints, checkpoints)
    trainer.profiler = StepProfiler(None, checkpoints, rank=0, world=1)
    trainer.points = points
    return trainer


def curve(
    case: Case, ahead: bool, tokenizer: Path, checkpoints: Path
) -> list[tuple[float, float, float]]:
    """The loss, the gradient's norm and the reward of each step."""
    recipe = recipe_of(case, alone=not dist.is_initialized(), ahead=ahead)
    trainer = build(recipe, tokenizer, checkpoints, torch.float64)
    trainer.fit()
    return [
        (each.loss, each.gradient_norm, each.further["reward"], each.further["drift"])
        for each in trainer.points
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def alone(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """What one process does; a step ahead or not."""

    @cache
    def of(ahead: bool) -> list[tuple[float, float, float]]:
        by_itself = case("alone", 1, {}, {"micro_batch_size": 8})
        return curve(by_itself, ahead, tokenizer, tmp_path_factory.mktemp("alone"))

    return of


@pytest.mark.parametrize("case", marked(CASES))
def test_a_layout_samples_and_learns_as_one_process_does(
    case: Case, tokenizer: Path, alone: Callable, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    ahead = case.world != 2  # the others sample a step ahead
    expected = alone(ahead)
    for found in pool(case.world).run(curve, case, ahead, tokenizer, tmp_path):
        assert found == [pytest.approx(point, rel=1e-10, abs=1e-14) for point in expected]
    assert max(norm for _, norm, _, _ in expected) > 0.01


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_a_run_that_ended_early_goes_on_to_the_same_bits(
    ahead: bool, tokenizer: Path, tmp_path: Path
) -> None:
    saved = case("saved", 1, {}, {**_HALVES, "checkpoint_every": 2})
    recipe = recipe_of(saved, alone=True, ahead=ahead)

    def trained(folder: Path, ends: int | None = None) -> Trainer:
        trainer = build(recipe, tokenizer, folder, torch.float32)

        def report(point: StepMetrics) -> None:
            trainer.points.append(point)
            if point.step == ends:
                raise InterruptedError

        trainer.report = report
        trainer.fit()
        return trainer

    expected = trained(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        trained(tmp_path / "parts", ends=5)
    found = trained(tmp_path / "parts")
    assert [each.loss for each in found.points] == [each.loss for each in expected.points[4:]]
    for ours, theirs in zip(found.parameters, expected.parameters, strict=True):
        assert torch.equal(ours, theirs)


def refuse(prompt: str, answer: str, wanted: str) -> float:
    raise UserError("reinforcement.rewards: no way to say")


def refused(tokenizer: Path, checkpoints: Path) -> str:
    """The error that a process ends with, where the reward refuses on rank 0."""
    recipe = recipe_of(CASES[0], alone=False)
    trainer = build(recipe, tokenizer, checkpoints, torch.float32, refuse)
    with pytest.raises(SharedError) as error:
        trainer.fit()
    return str(error.value)


def test_a_reward_that_refuses_ends_all_processes(
    tokenizer: Path, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    told = ["reinforcement.rewards: no way to say"] * 2
    assert pool(2).run(refused, tokenizer, tmp_path) == told

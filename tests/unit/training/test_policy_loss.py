"""The loss of rewarded answers, and its gradients, beside those of TRL."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.loading.dataloader import IGNORED
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.reinforcement_section import Reinforcement
from pipelines.reinforcement.answer_sampler import Group
from pipelines.reinforcement.prompts import Prompt
from pipelines.reinforcement.rollout_loader import RolloutLoader
from pipelines.training.policy_loss import PolicyLoss

MESH = build_mesh(resolve_layout(Recipe(name="rewards").parallel, 1), torch.device("cpu"))
LENGTHS = (5, 2, 3), (1, 4, 4)  # of the answers to each prompt
WORTH = (1.0, 0.0, 0.5), (0.0, 0.0, 2.0)
PROMPT = [256, 7, 8]
LENGTH = 12
MOST = 6  # tokens of an answer


class Prepared:
    """A prompt store and samplers whose answers are those above."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def numbers(size: int) -> list[float]:
            return (-3 * torch.rand(size, generator=draw)).tolist()

        self.groups = [
            Group(
                PROMPT,
                [list(range(10, 10 + size)) for size in sizes],
                [numbers(size) for size in sizes],
                [numbers(size) for size in sizes],
                [True] * len(sizes),
                {"exact_match": list(worth)},
            )
            for sizes, worth in zip(LENGTHS, WORTH, strict=True)
        ]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Prompt:
        return Prompt(number, PROMPT[1:], [])

    def ask(self, weights: Any, step: int, prompts: Any) -> Any:
        return [self.groups[number] for number in range(len(prompts))]

    def answers(self, asked: Any) -> Any:
        return list(asked)


def loader_of(**reinforcement: Any) -> tuple[RolloutLoader, Prepared]:
    wanted = {
        "kind": "grpo",
        "answers": 3,
        "max_tokens": MOST,
        "rewards": [{"name": "exact_match"}],
    }
    recipe = Recipe.model_validate(
        {
            "name": "rewards",
            "data": {"instruction": {"kind": "prompt_response"}, "sequence_length": LENGTH},
            "train": {"global_batch_size": 6, "micro_batch_size": 6},
            "reinforcement": wanted | reinforcement,
        }
    )
    prepared = Prepared()
    loader = RolloutLoader(recipe, prepared, MESH)
    loader._samplers, loader._names = prepared, []
    return loader, prepared


CASES = [
    ({}, "grpo"),
    ({"kl": 0.3}, "grpo"),
    ({"advantage": "centred", "mean_over": "limit", "kl": 0.1}, "dr_grpo"),
    ({"mean_over": "tokens", "clip": (0.2, 0.28)}, "bnpo"),
]


@pytest.mark.parametrize(("reinforcement", "kind"), CASES, ids=["grpo", "kl", "dr_grpo", "dapo"])
def test_loss_and_gradients_are_trls(reinforcement: dict[str, Any], kind: str) -> None:
    from trl import GRPOTrainer

    loader, prepared = loader_of(**reinforcement)
    ((batch, is_last),) = loader.micro_batches(0)
    assert is_last
    by = loader.recipe.reinforcement
    loss = PolicyLoss(by, MESH)
    nats = 3 * torch.rand(6, LENGTH, generator=torch.Generator().manual_seed(1))
    mine, other = (nats.clone().requires_grad_() for _ in range(2))
    there = batch.targets_BS != IGNORED
    found = loss(mine * there, batch.targets_BS, batch.documents_BS, batch.known_BK)
    found = found / loss.counted(batch)

    first = len(PROMPT) - 1
    logs = -other[:, first : first + MOST]
    padded = [torch.zeros(6, MOST) for _ in range(2)]
    for place, (own, of_first) in enumerate(
        pair for group in prepared.groups for pair in zip(group.logs, group.first_logs, strict=True)
    ):
        padded[0][place, : len(own)] = torch.tensor(own)
        padded[1][place, : len(of_first)] = torch.tensor(of_first)
    worth = torch.tensor(WORTH)
    advantages = worth - worth.mean(dim=1, keepdim=True)
    if by.advantage == "normalised":
        advantages = advantages / (worth.std(dim=1, keepdim=True) + 1e-4)
    expected = GRPOTrainer._compute_loss(
        trainer_of_trl(logs, by, kind),
        SimpleNamespace(),
        {
            "prompt_ids": torch.zeros(6, 1),
            "prompt_mask": torch.ones(6, 1),
            "completion_ids": torch.zeros(6, MOST),
            "completion_mask": there[:, first : first + MOST].int(),
            "advantages": advantages.flatten(),
            "old_per_token_logps": padded[0],
            "ref_per_token_logps": padded[1],
        },
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(*each)[0] for each in ((found, mine), (expected, other)))
    assert ours.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def trainer_of_trl(logs: Tensor, by: Reinforcement, kind: str) -> SimpleNamespace:
    """What `GRPOTrainer._compute_loss` asks of its trainer, whose model gives these logs."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logs, torch.zeros_like(logs), None),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        accelerator=SimpleNamespace(
            gather=lambda each: each, reduce=lambda each, **_: each, sync_gradients=False
        ),
        beta=by.kl,
        epsilon_low=by.clip[0],
        epsilon_high=by.clip[1],
        loss_type=kind,
        max_completion_length=MOST,
        importance_sampling_level="token",
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def test_figures_are_means_over_tokens() -> None:
    loader, _ = loader_of(clip=(0.2, 0.2))
    ((batch, _),) = loader.micro_batches(0)
    loss = PolicyLoss(loader.recipe.reinforcement, MESH)
    sampled = batch.known_BK.view(6, 4, LENGTH)[:, 2]
    loss(-sampled - 0.5, batch.targets_BS, batch.documents_BS, batch.known_BK)
    loss.end_step(1)
    loss.end_window()
    assert loss.figures["sampler_mismatch"] == pytest.approx(0.5)
    # Tokens became likelier by a factor of 1.65: those of better answers teach nothing more.
    better = sum(
        size
        for sizes, worth in zip(LENGTHS, WORTH, strict=True)
        for size, each in zip(sizes, worth, strict=True)
        if each > sum(worth) / 3
    )
    assert loss.figures["clipped_share"] == pytest.approx(better / sum(map(sum, LENGTHS)))


def test_each_process_gets_its_answers_and_all_have_the_same_shares() -> None:
    loader, _ = loader_of(mean_over="tokens")
    ((whole, _),) = loader.micro_batches(0)
    parts = []
    for rank in range(4):  # six answers: two processes have one more
        share, _ = loader_of(mean_over="tokens")
        share._mesh = SimpleNamespace(dp_rank=rank, dp_world=4, device=torch.device("cpu"))
        parts += [batch for batch, _ in share.micro_batches(0)]
    for all_rows, *rows in zip(whole, *parts, strict=True):
        assert torch.equal(all_rows, torch.cat(rows))


def test_prompts_that_teach_nothing_are_replaced_where_asked() -> None:
    loader, prepared = loader_of(draws=2)
    even = prepared.groups[0]._replace(rewards={"exact_match": [1.0] * 3})
    other = prepared.groups[1]
    draws = iter([[even, other], [other, even]])
    prepared.ask = lambda *_: next(draws)
    list(loader.micro_batches(0))
    assert loader.end_window()["even_prompts"] == 0
    draws = iter([[even, even], [even, other]])
    list(loader.micro_batches(1))
    assert loader.end_window()["even_prompts"] == 0.5  # no more were allowed


def test_a_checkpoint_holds_answers_that_were_sampled_ahead() -> None:
    loader, _ = loader_of(ahead=True)
    list(loader.micro_batches(0))
    state = loader.state_dict()
    assert state["step"] == 1
    other, resampled = loader_of(ahead=True)
    other.load_state_dict(state)
    asked = []
    resampled.ask = lambda _, step, prompts: asked.append(step) or list(resampled.groups)
    ((batch, _),) = other.micro_batches(1)
    assert asked == [2]  # step 1 is in the checkpoint
    ((same, _),) = loader.micro_batches(1)
    assert torch.equal(batch.known_BK, same.known_BK)

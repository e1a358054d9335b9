"""Batches of answers that the model samples itself, instead of a dataset's.

The prompts of a step, its seeds and its weights say what its answers are, so the step is the whole
state, as with a dataset. Where answers are sampled a step ahead, those of the next step were made
with weights that a checkpoint does not have, so it holds the answers themselves.
"""

# ruff: noqa: N803, N806 (names that end in their shape)

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.loading.sampler import samples, share
from pipelines.models.gather import Gather, of_all_stages
from pipelines.parallel.mesh import Mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import from_all, one_for_all
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.alarms import LENGTH, REWARD, Alarms
from pipelines.reinforcement.answer_sampler import Group, Sampler, Weights, rows
from pipelines.reinforcement.prompts import Prompt, Prompts
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics

_log = logging.getLogger(__name__)
_EVERY_S = 5.0  # between two lines of the log
_TINY = 1e-4  # beside a deviation; TRL adds the same


class Samplers(Protocol):
    """Who samples: actors elsewhere, or this process."""

    def ask(self, weights: Weights, step: int, prompts: Sequence[Prompt]) -> Any:
        """Begin to answer prompts, and return what `answers` takes."""

    def answers(self, asked: Any) -> list[Group]:
        """Wait for the answers, in the order of the prompts."""


class InThisProcess:
    """Samples where training runs, before it goes on."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def ask(self, weights: Weights, step: int, prompts: Sequence[Prompt]) -> Any:
        """See `Samplers`."""
        return self._sampler.answer(weights, step, prompts)

    def answers(self, asked: Any) -> list[Group]:
        """See `Samplers`."""
        return list(asked)


class _Flight(NamedTuple):
    """Answers that are being sampled; only rank 0 knows more than the step."""

    step: int
    weights: Weights
    asked: Any
    landed: list[Group] | None = None


class RolloutLoader:
    """Yields this process's micro-batches of any step, like a `TokenLoader`."""

    has_mask = True
    most_documents = 1  # each answer is a sample
    source = "the model's own answers"

    def __init__(self, recipe: Recipe, prompts: Prompts, mesh: Mesh) -> None:
        """Keep the arguments; `begin` says whose answers they are."""
        self.tokens_per_step = recipe.train.global_batch_size * recipe.data.sequence_length
        self.recipe = recipe
        self.alarms = Alarms(recipe.reinforcement)
        self._by = recipe.reinforcement
        self._prompts = prompts
        self._mesh = mesh
        self._a_step = recipe.train.global_batch_size // self._by.answers  # prompts
        self._samplers: Samplers | None = None
        self._flight: _Flight | None = None
        self._seen: list[dict[str, float]] = []  # of each step of this window
        self._held: dict[int, list[Group]] = {}  # of this step; after a restart of the next one

    def begin(self, model: Parallelized, samplers: Samplers | None, events: Events) -> None:
        """Learn which weights training changes; all processes call it.

        Args:
            model: What is trained.
            samplers: On rank 0.
            events: Is told of alarms.
        """
        self.alarms.events = events
        places = model.changed()
        here = {name: tuple(each.shape) for name, each in places.items()}
        shapes = of_all_stages(model.modules, here)
        self._names = sorted(shapes)
        self._gather = Gather(shapes, places)
        self._samplers = samplers

    @property
    def states(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it."""
        return {"rollouts": self, "alarms": self.alarms}

    def look(self, metrics: StepMetrics) -> None:
        """Raise an alarm if a point of the curves shows that the model pleases its rewards only."""
        self.alarms.look(metrics)

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of one step, each with whether it is the last one."""
        groups, answers = self._groups(step), self.recipe.train.global_batch_size
        start, stop = share(self._mesh.dp_rank, self._mesh.dp_world, answers)
        micro = self.recipe.train.fixed_micro_batch_size
        mine = self._batch(groups, start, stop)
        for first in range(0, stop - start, micro):
            some = (each[first : first + micro] for each in mine if each is not None)
            yield Batch(*some), first + micro >= stop - start

    def digest(self, steps: Iterable[int]) -> str:
        """Return a hash, as 16 hex digits, of the prompts of some steps in order."""
        hashed = hashlib.blake2b(digest_size=8)
        for step in steps:
            hashed.update(self._numbers(step).astype("<i8").tobytes())
        return hashed.hexdigest()

    def end_window(self) -> dict[str, float]:
        """Return the means since the last call: the rewards, the answers' tokens, the share that
        came to no end, and the share of prompts whose answers are all worth the same.
        """
        seen, self._seen = self._seen, []
        return {name: fmean(each[name] for each in seen) for name in (seen[0] if seen else ())}

    def _numbers(self, step: int) -> Any:
        """Return the numbers of the prompts that a step may try."""
        return samples(
            self.recipe.seed, step, 0, 1, self._a_step * self._by.draws, len(self._prompts)
        )

    def _groups(self, step: int) -> list[Group]:
        """Return a step's answers; all processes call it."""
        if step not in self._held:
            if self._flight is None or self._flight.step != step:
                self._flight = self._take_off(step)
            self._held = {step: from_all(self._land(self._flight))[0]}
            self._flight = None
        if self._by.ahead and step + 1 < self.recipe.train.steps:
            self._flight = self._take_off(step + 1)
        groups = self._held[step]
        self._seen.append(_figures(groups, self._by.rewards))
        return groups

    def _take_off(self, step: int) -> _Flight:
        """Begin to sample a step's answers with the weights as they are; all processes call it."""
        gathered = {name: self._gather(name, 0) for name in self._names}
        flight = _Flight(step, gathered, None)
        with one_for_all():  # a reward may refuse
            return flight._replace(asked=self._ask(flight, draw=0))

    def _ask(self, flight: _Flight, draw: int) -> Any:
        """Begin to answer as many prompts as a step has, of those that it may try."""
        if self._samplers is None:
            return None
        numbers = self._numbers(flight.step)[draw * self._a_step : (draw + 1) * self._a_step]
        prompts = [self._prompts[int(number)] for number in numbers]
        return self._samplers.ask(flight.weights, flight.step, prompts)

    def _land(self, flight: _Flight) -> list[Group]:
        """Wait for a step's answers, which only rank 0 gets; all processes call it."""
        with one_for_all():
            return self._landed(flight)

    def _landed(self, flight: _Flight) -> list[Group]:
        """Return the answers; those of prompts that teach nothing are replaced, if asked."""
        if self._samplers is None or flight.landed is not None:
            return flight.landed or []
        began, size = time.monotonic(), self._a_step
        found = self._samplers.answers(flight.asked)
        for draw in range(1, self._by.draws):
            if sum(map(self._teaches, found)) >= size:
                break
            found += self._samplers.answers(self._ask(flight, draw))
        if (took := time.monotonic() - began) > _EVERY_S:
            _log.info(
                "step %d: waited %.1f s for %d prompts' answers", flight.step, took, len(found)
            )
        return sorted(found, key=lambda each: not self._teaches(each))[:size]

    def _teaches(self, group: Group) -> bool:
        return len(set(_worth(group, self._by.rewards))) > 1

    def _batch(self, groups: Sequence[Group], start: int, stop: int) -> Batch:
        """Return the answers from one number to another as a batch on this process's device."""
        length, size = self.recipe.data.sequence_length, self._by.answers
        tokens = sum(len(answer) for group in groups for answer in group.answers)
        inputs, targets, known = [], [], []
        for group in groups[start // size : -(-stop // size)]:
            inputs_BS, targets_BS = rows(group.prompt, group.answers, torch.device("cpu"), length)
            inputs.append(inputs_BS)
            targets.append(targets_BS)
            known.append(self._known(group, targets_BS, tokens))
        mine = slice(start % size, start % size + stop - start)
        inputs_BS, targets_BS, known_BK = (
            torch.cat(each)[mine].to(self._mesh.device) for each in (inputs, targets, known)
        )
        return Batch(
            inputs_BS, targets_BS, torch.zeros_like(inputs_BS, dtype=torch.int32), known_BK
        )

    def _known(self, group: Group, targets_BS: Tensor, tokens: int) -> Tensor:
        """Return what `PolicyLoss` knows of a prompt's answers, [B, K]; `tokens` of all answers."""
        there_BS = targets_BS != IGNORED
        lengths_B1 = there_BS.sum(dim=1, keepdim=True)
        shares_B1 = {
            "answers": 1 / lengths_B1,
            "tokens": torch.full_like(
                lengths_B1, self.recipe.train.global_batch_size / tokens, dtype=torch.float32
            ),
            "limit": torch.full_like(lengths_B1, 1 / self._by.max_tokens, dtype=torch.float32),
        }[self._by.mean_over]
        advantages_B1 = self._advantages(group)[:, None]
        positions = [each.expand_as(targets_BS).float() for each in (advantages_B1, shares_B1)]
        for logs in (group.logs, group.first_logs):
            placed_BS = torch.zeros(targets_BS.shape)
            placed_BS[there_BS] = torch.tensor(list(chain.from_iterable(logs)))
            positions.append(placed_BS)
        return torch.stack(positions, dim=1).flatten(1)

    def _advantages(self, group: Group) -> Tensor:
        worth_B = torch.tensor(_worth(group, self._by.rewards))
        apart_B = worth_B - worth_B.mean()
        if self._by.advantage == "centred":
            return apart_B
        return apart_B / (worth_B.std() + _TINY)

    def state_dict(self) -> dict[str, Any]:
        """Return the answers of the next step, if they are sampled ahead; rank 0's count."""
        if self._flight is None:
            return {"step": None, "groups": []}
        groups = self._land(self._flight)
        self._flight = self._flight._replace(landed=groups)
        return {"step": self._flight.step, "groups": [each._asdict() for each in groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a checkpoint's answers."""
        self._flight = None
        step, groups = state_dict["step"], [Group(**each) for each in state_dict["groups"]]
        self._held = {} if step is None else {step: groups}


def _worth(group: Group, rewards: Sequence[Any]) -> list[float]:
    """Return what each answer is worth."""
    weighed = [[each.weight * value for value in group.rewards[each.name]] for each in rewards]
    return [sum(values) for values in zip(*weighed, strict=True)]


def _figures(groups: Sequence[Group], rewards: Sequence[Any]) -> dict[str, float]:
    worth = [_worth(group, rewards) for group in groups]
    lengths = [len(answer) for group in groups for answer in group.answers]
    ended = [each for group in groups for each in group.ended]
    figures = {
        REWARD: sum(map(sum, worth)) / len(lengths),
        LENGTH: sum(lengths) / len(lengths),
        "cut_off_share": 1 - sum(ended) / len(ended),
        "even_prompts": sum(len(set(each)) == 1 for each in worth) / len(worth),
    }
    for each in rewards:
        values = [value for group in groups for value in group.rewards[each.name]]
        figures[f"{REWARD}_{each.name}"] = sum(values) / len(values)
    return figures

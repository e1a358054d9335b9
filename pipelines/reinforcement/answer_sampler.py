"""Samples answers from a model, and says what they are worth and how likely they were.

What an answer is depends only on the weights, the prompt, the seed and the step: not on which
process samples it, nor on what else that process samples.
"""

# ruff: noqa: N803, N806 (names that end in their shape)

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.loading.dataloader import IGNORED
from pipelines.models.transformer import Transformer
from pipelines.models.weights import canonical_name, fill, named_generator
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.prompts import Prompt
from pipelines.reinforcement.rewards import rewards_of
from pipelines.training.precision import autocast, set_precision

Weights = Mapping[str, Tensor]


class Group(NamedTuple):
    """The answers to one prompt; JSON can hold it.

    Attributes:
        prompt: Its ids, after the end of the document before it.
        answers: The ids of each, with the one that ends it, if it came to an end.
        logs: The log-likelihood of each id by the model that sampled it.
        first_logs: The same by the model that training started from.
        ended: Whether each came to an end.
        rewards: Of each, by the reward's name.
    """

    prompt: list[int]
    answers: list[list[int]]
    logs: list[list[float]]
    first_logs: list[list[float]]
    ended: list[bool]
    rewards: dict[str, list[float]]


class Sampler:
    """A model that answers prompts with the trainer's weights."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Path,
        make: Callable[[], Transformer],
        device: torch.device,
    ) -> None:
        """Load the model that training starts from.

        Args:
            recipe: `reinforcement`, `seed` and `train.precision` are used.
            tokenizer: Its folder.
            make: Returns the model, with its adapters, on the device.
            device: To compute on.
        """
        set_precision(recipe.train, device)
        self._by = recipe.reinforcement
        self._seed = recipe.seed
        self._autocast = autocast(recipe.train.fixed_precision, device)
        self._device = device
        self._encoder = Encoder(tokenizer)
        chat = ChatEncoder(tokenizer)
        self._stops = {self._encoder.end_id, chat.end_of_answer}
        self._rewards = rewards_of(self._by)
        self._model = make().eval()
        self._model.objective = _nats
        parameters = self._model.named_parameters()
        self._places: dict[str, Tensor] = {canonical_name(name): each for name, each in parameters}
        self._places |= self._model.balance_biases
        self._first: Weights | None = None  # what training starts from, of what it changes

    @torch.no_grad()
    def answer(self, weights: Weights, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        """Answer each prompt `reinforcement.answers` times.

        Args:
            weights: What training changes, by canonical names.
            step: Which the answers are for.
            prompts: What to answer.
        """
        if self._first is None:
            self._first = {name: self._places[name].detach().cpu().clone() for name in weights}
        self._load(weights)
        sampled = [self._sample(step, prompt) for prompt in prompts]
        self._load(self._first)
        return [
            self._group(prompt, *answers) for prompt, answers in zip(prompts, sampled, strict=True)
        ]

    def _load(self, weights: Weights) -> None:
        for name, tensor in weights.items():
            fill(self._places[name], tensor)

    def _sample(
        self, step: int, prompt: Prompt
    ) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Return the ids of each answer, their log-likelihoods, and whether it came to an end."""
        number = self._by.answers
        # Drawn on the CPU, so that a seed gives the same answers on every device.
        name = f"{step} {prompt.number}"
        generator = named_generator(self._seed, name, torch.device("cpu"))
        start = torch.tensor([[self._encoder.end_id, *prompt.ids]], device=self._device)
        rows_BS = start.expand(number, -1)
        answers: list[list[int]] = [[] for _ in range(number)]
        logs: list[list[float]] = [[] for _ in range(number)]
        ended = [False] * number
        for _ in range(self._by.max_tokens):
            with self._autocast:
                logits_BSV = self._model(rows_BS)
            logs_BV = logits_BSV[:, -1].float().cpu().log_softmax(dim=-1)
            ids_B1 = torch.multinomial(logs_BV.exp(), 1, generator=generator)
            drawn = zip(
                ids_B1[:, 0].tolist(), logs_BV.gather(1, ids_B1)[:, 0].tolist(), strict=True
            )
            for row, (id_, log) in enumerate(drawn):
                if not ended[row]:
                    answers[row].append(id_)
                    logs[row].append(log)
                    ended[row] = id_ in self._stops
            if all(ended):
                break
            rows_BS = torch.cat([rows_BS, ids_B1.to(self._device)], dim=1)
        return answers, logs, ended

    def _group(
        self,
        prompt: Prompt,
        answers: list[list[int]],
        logs: list[list[float]],
        ended: list[bool],
    ) -> Group:
        start = [self._encoder.end_id, *prompt.ids]
        inputs_BS, targets_BS = rows(start, answers, self._device)
        with self._autocast:
            nats_BS = self._model(inputs_BS, torch.zeros_like(inputs_BS), targets_BS).float().cpu()
        begin = len(start) - 1
        first_logs = [
            (-nats_BS[row, begin : begin + len(each)]).tolist() for row, each in enumerate(answers)
        ]
        asked, wanted = self._encoder.decode(prompt.ids), self._text(prompt.wanted)
        texts = [self._text(each) for each in answers]
        rewards = {
            name: [reward(asked, text, wanted) for text in texts]
            for name, reward in self._rewards.items()
        }
        return Group(start, answers, logs, first_logs, ended, rewards)

    def _text(self, ids: list[int]) -> str:
        """Return the text of ids up to what ends it."""
        stop = next((place for place, id_ in enumerate(ids) if id_ in self._stops), len(ids))
        return self._encoder.decode(ids[:stop])


def rows(
    prompt: list[int], answers: Sequence[list[int]], device: torch.device, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [B, S] of a prompt with its answers, which alone are targets."""
    whole = [[*prompt, *answer] for answer in answers]
    width = length or max(map(len, whole)) - 1
    inputs_BS = torch.zeros(len(whole), width, dtype=torch.int64)
    targets_BS = torch.full_like(inputs_BS, IGNORED)
    for row, ids in enumerate(whole):
        inputs_BS[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets_BS[row, len(prompt) - 1 : len(ids) - 1] = torch.tensor(ids[len(prompt) :])
    return inputs_BS.to(device), targets_BS.to(device)


def _nats(
    nats_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor, known_BK: Tensor | None
) -> Tensor:
    """Leave the nats of each position as they are."""
    del targets_BS, documents_BS, known_BK
    return nats_BS

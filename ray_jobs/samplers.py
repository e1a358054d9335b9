"""Processes of a Ray cluster that sample the answers a model learns from.

A sampler that dies is started anew by Ray, and samples the same answers again: each call brings the
weights, and what an answer is depends on nothing that a sampler remembers.
"""

from collections.abc import Sequence
from typing import Any

import ray

from pipelines.core.errors import UserError
from pipelines.reinforcement.answer_sampler import Group, Weights
from pipelines.reinforcement.prompts import Prompt
from pipelines.stages.train.train_rollouts import MakeSampler

_RESTARTS = 8  # of one sampler, so that one that always dies is seen


class SamplersOnRay:
    """Actors, a GPU each where there are any, which end with this process."""

    def __init__(self, make: MakeSampler, number: int) -> None:
        """Start them; calls wait until they run."""
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        actor = ray.remote(
            num_cpus=0 if on_gpu else 1,
            num_gpus=1 if on_gpu else 0,
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
        )(_Actor)
        self._actors = [actor.remote(make) for _ in range(number)]

    def ask(self, weights: Weights, step: int, prompts: Sequence[Prompt]) -> list[Any]:
        """Begin to answer prompts, each sampler about as many."""
        held = ray.put(dict(weights))
        number = len(self._actors)
        return [
            actor.answer.remote(held, step, prompts[first::number])
            for first, actor in enumerate(self._actors)
        ]

    def answers(self, asked: list[Any]) -> list[Group]:
        """Wait for the answers, in the order of the prompts.

        Raises:
            UserError: a reward refuses.
        """
        shares = ray.get(asked)
        if told := next((each for each in shares if isinstance(each, str)), None):
            raise UserError(told)
        total = sum(map(len, shares))
        return [shares[place % len(shares)][place // len(shares)] for place in range(total)]


class _Actor:
    def __init__(self, make: MakeSampler) -> None:
        import torch

        from pipelines.core.log import set_up_logging

        set_up_logging()
        self._sampler = make(torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu"))

    def answer(self, weights: Weights, step: int, prompts: Sequence[Prompt]) -> list[Group] | str:
        """See `Sampler.answer`; a user's error is returned: one that is raised is tried again."""
        try:
            return self._sampler.answer(weights, step, prompts)
        except UserError as error:
            return str(error)

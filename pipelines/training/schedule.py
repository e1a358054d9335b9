"""The learning rate of each step, and the step after which a run ends.

Two schedules warm up linearly. `cosine` then falls by half a cosine until the recipe's last step.
`wsd` (warm-up, stable, decay) keeps the peak until half of the steps are done, and then falls in a
straight line. Source: Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed
Training Durations". As its first half does not depend on the number of steps, a time limit can
still choose that number when half of the time is over.
"""

import math
from typing import Any

from torch.optim import Optimizer

from pipelines.recipe.training_section import Train

_STABLE = 0.5  # the part of the steps, and of the time, before `wsd` decays


class Schedule:
    """The learning rate and the last step, which the clock may choose once.

    Attributes:
        last_step: The number of steps after which the run ends, as far as is known.
    """

    def __init__(self, train: Train, last_step: int | None = None) -> None:
        """Begin with the recipe's number of steps.

        Args:
            train: Its schedule, steps and time limit are used.
            last_step: The number of steps of an earlier run that is repeated, if the clock chose
                it; the clock then chooses nothing.
        """
        self._train = train
        self._chosen = last_step  # by the clock, of this run or of the one that is repeated
        self.last_step = last_step or train.steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It depends only on the step and on `last_step`, so a resumed run goes on as if it had never
        stopped.
        """
        train = self._train
        if step < train.warmup_steps:
            return train.lr * (step + 1) / train.warmup_steps
        if train.lr_schedule == "wsd":
            left = 1 - step / self.last_step
            part = min(1.0, left / (1 - _STABLE))
        else:
            done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
            part = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * part)

    def end_by_clock(self, step: int, seconds: float) -> int | None:
        """Return the last step if the clock chooses it now, and None otherwise.

        A cosine is cut where the time is over. `wsd` ends after as many further steps as those of
        the first half of the time, however long they take.

        Args:
            step: The number of steps done.
            seconds: The time that they took.
        """
        limit = self._train.max_seconds
        if limit is None or self._chosen is not None:
            return None
        if self._train.lr_schedule == "cosine":
            return step if seconds >= limit else None
        if seconds < _STABLE * limit:
            return None
        return min(self._train.steps, math.ceil(step / _STABLE))

    def end_after(self, step: int) -> None:
        """End the run after this step; all processes call this with the first one's choice."""
        self.last_step = step
        if self._train.lr_schedule == "wsd":
            self._chosen = step

    def state_dict(self) -> dict[str, Any]:
        """Return what the clock chose. A cosine that was cut may go on with a longer limit."""
        return {"chosen": self._chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        if (chosen := state_dict["chosen"]) is not None:
            self.end_after(chosen)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate

"""Notices where a model learns to please its rewards rather than to answer well."""

import logging
from typing import Any

from pipelines.recipe.reinforcement_section import Reinforcement
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics

_log = logging.getLogger(__name__)
REWARD, LENGTH = "reward", "answer_tokens"


class Alarms:
    """Compares each point of the curves with the first one; every process does so alike.

    Attributes:
        events: Is told of them.
    """

    def __init__(self, by: Reinforcement) -> None:
        """Begin with no point."""
        self.events = Events()
        self._by = by
        self._watched = [f"{REWARD}_{each.name}" for each in by.rewards if not each.weight]
        self._first: dict[str, float] = {}
        self._raised: dict[str, str] = {}  # by kind

    @property
    def raised(self) -> list[str]:
        """What was noticed, a sentence each, in order."""
        return list(self._raised.values())

    def look(self, metrics: StepMetrics) -> None:
        """Note what a point shows for the first time."""
        now = metrics.further
        if LENGTH not in now:
            return
        told = f"{REWARD} {now[REWARD]:.3f}, {now[LENGTH]:.1f} tokens an answer"
        _log.info("step %d: %s, drift %.3g nats a token", metrics.step, told, now["drift"])
        self._first = self._first or {
            name: value for name, value in now.items() if name.startswith((REWARD, LENGTH))
        }
        by, first = self._by, self._first
        self._raise_if(
            now["drift"] > by.max_drift,
            "drift",
            f"the model is {now['drift']:.3g} nats a token from the one that training started from",
            metrics.step,
        )
        self._raise_if(
            now[LENGTH] > by.max_growth * first[LENGTH],
            "length",
            f"answers have {now[LENGTH]:.0f} tokens, and had {first[LENGTH]:.0f} at first",
            metrics.step,
        )
        self._raise_if(
            now["sampler_mismatch"] > by.max_mismatch,
            "mismatch",
            f"trainer and sampler disagree by {now['sampler_mismatch']:.3g} nats a token",
            metrics.step,
        )
        for name in self._watched:
            self._raise_if(
                now[name] < first[name] - by.max_watched_loss and now[REWARD] > first[REWARD],
                name,
                f"the reward rose from {first[REWARD]:.3g} to {now[REWARD]:.3g}, but the watched "
                f"{name.removeprefix(REWARD + '_')} fell from {first[name]:.3g} to {now[name]:.3g}",
                metrics.step,
            )

    def _raise_if(self, is_so: bool, kind: str, what: str, step: int) -> None:
        if not is_so or kind in self._raised:
            return
        self._raised[kind] = f"step {step}: {what}"
        done = "went on; the model is refused at registration"
        self.events.note("alarm", f"{kind} alarm at step {step}", what, done, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"first": self._first, "raised": dict(self._raised)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._first, self._raised = state_dict["first"], state_dict["raised"]

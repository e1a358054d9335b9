"""The hooks of a run: objects that accompany its steps and change nothing that is computed."""

from contextlib import ExitStack
from typing import Literal, Self

from typing_extensions import override

from pipelines.run.logbook import Kind

Phase = Literal[
    "data", "forward and backward", "communication", "optimizer", "report", "checkpoint"
]


class Hook:
    """Is called on every process at the same points of a run; used as a context manager around it.

    A method that a hook does not override does nothing.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_training(self, step: int) -> None:
        """Note that training begins, or goes on from the checkpoint after `step`."""

    def begin_window(self) -> None:
        """Note that the first step after a report begins; the host has waited for the device."""

    def before_step(self, step: int) -> None:
        """Note that a step begins."""

    def enter_phase(self, step: int, phase: Phase) -> None:
        """Note that the process enters a phase of a step, or of what comes after the step."""

    def after_step(self, step: int, *, last: bool) -> None:
        """Note that the host has issued the work of a step, which may be the run's last."""


class Events(Hook):
    """Receives the events on every process; this base class keeps nothing."""

    def note(
        self,
        kind: Kind,
        key: str,
        cause: str,
        done: str,
        *,
        step: int | None = None,
        seconds_lost: float | None = None,
    ) -> None:
        """Note an event.

        Args:
            kind: The event's kind, as in the logbook.
            key: Identifies the event: another note with the same key is the same event.
            cause: Why it happened.
            done: What was done about it.
            step: The number of optimizer steps done by then.
            seconds_lost: The time that every process spent on work that must be done again.
        """

    def ended(self, step: int, model_hash: str) -> None:
        """Note that the last step is done and its model is written."""


class Hooks(Hook):
    """Calls several hooks in their order."""

    def __init__(self, *hooks: Hook) -> None:
        self._hooks = hooks

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    @override
    def begin_training(self, step: int) -> None:
        for hook in self._hooks:
            hook.begin_training(step)

    @override
    def begin_window(self) -> None:
        for hook in self._hooks:
            hook.begin_window()

    @override
    def before_step(self, step: int) -> None:
        for hook in self._hooks:
            hook.before_step(step)

    @override
    def enter_phase(self, step: int, phase: Phase) -> None:
        for hook in self._hooks:
            hook.enter_phase(step, phase)

    @override
    def after_step(self, step: int, *, last: bool) -> None:
        for hook in self._hooks:
            hook.after_step(step, last=last)

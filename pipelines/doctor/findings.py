"""What checks say, and how all of it is told by one word and one exit code."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check came out, from the least to the worst."""

    NOT_HERE = "not here"
    OK = "ok"
    WARNING = "warning"  # it works, slower or less safely than it could
    PROBLEM = "problem"  # a run fails of it, or may


# A thing that a machine does not have is no fault of the machine.
EXIT_CODES = {State.NOT_HERE: 0, State.OK: 0, State.WARNING: 1, State.PROBLEM: 2}


class NotHereError(Exception):
    """There is nothing to check, and why."""


class FaultError(Exception):
    """What should answer does not: its own words, and the fix."""

    def __init__(self, saw: str, fix: str) -> None:
        super().__init__(saw)
        self.fix = fix


class ToolFailedError(FaultError):
    """It ended with an error; what it printed before may tell all the same."""

    def __init__(self, saw: str, fix: str, output: str) -> None:
        super().__init__(saw, fix)
        self.output = output


class NoAnswerError(FaultError):
    """It did not end in time, as what hangs does, or what shares its cores with too much else."""


@dataclass(frozen=True)
class Seen:
    """What a check saw, and where it is no good the fix."""

    state: State
    saw: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: For a user.
        why: Why it matters.
        look: Reads and judges; raises NotHereError where there is nothing to look at.
    """

    name: str
    why: str
    look: Callable[[], Iterable[Seen]]


@dataclass(frozen=True)
class Finding:
    """What one check saw, as it is printed."""

    check: str
    state: State
    saw: str
    why: str
    fix: str


def ok(saw: str) -> Seen:
    """Return all is well."""
    return Seen(State.OK, saw)


def warning(saw: str, fix: str) -> Seen:
    """Return a finding: it works, but not as it should."""
    return Seen(State.WARNING, saw, fix)


def problem(saw: str, fix: str) -> Seen:
    """Return a finding: it does not work, or a run would fail because of it."""
    return Seen(State.PROBLEM, saw, fix)


def worst(findings: Iterable[Finding]) -> State:
    """Return the state of the whole."""
    order = list(State)
    return max((finding.state for finding in findings), key=order.index, default=State.NOT_HERE)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well or not here, 1 with a warning, 2 with a problem."""
    return EXIT_CODES[worst(findings)]

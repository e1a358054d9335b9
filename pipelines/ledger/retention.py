"""What of a run is kept, and for how long: the rules of `penstock gc`, and nothing but them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["live", "succeeded", "failed"]
DAY = 86_400.0  # seconds
SETTLES = 3600.0  # seconds in which nothing that just changed is touched, whatever the rules say


@dataclass(frozen=True)
class Rules:
    """Ages in days since a run last wrote anything."""

    days: float = 14  # the workspace of a run that succeeded, and a result in the stage cache
    failed_days: float = 3  # the workspace of one that failed
    checkpoint_days: float = 2  # the checkpoints of one that succeeded: its model is exported
    keep_last: int = 3  # so many that succeeded of each recipe are kept, however old


@dataclass(frozen=True)
class RunFacts:
    """A run as far as the rules ask."""

    name: str  # of its workspace
    recipe: str
    state: State
    changed: float  # seconds since the epoch
    model_hash: str | None = None  # of the model that it trained or took from the cache


@dataclass(frozen=True)
class Decision:
    """What may go of one run, and why."""

    run: RunFacts
    what: Literal["workspace", "checkpoints"]
    why: str


def decide(
    runs: Iterable[RunFacts], rules: Rules, aliased: Collection[str], now: float
) -> Iterator[Decision]:
    """What may go; a run that is not named is kept whole.

    Args:
        runs: All there are.
        rules: Ages and numbers.
        aliased: Content hashes of the registered models that an alias names, champions among them;
            whoever trained one keeps workspace and checkpoints.
        now: Seconds since the epoch.
    """
    families: dict[str, list[RunFacts]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.changed, reverse=True):
        families[run.recipe].append(run)
    for family in families.values():
        succeeded = [run.name for run in family if run.state == "succeeded"]
        last = succeeded[: rules.keep_last]
        for run in family:
            age = now - run.changed
            if run.state == "live" or run.model_hash in aliased or age < SETTLES:
                continue
            decision = _of(run, rules, age / DAY, is_last=run.name in last)
            if decision is not None:
                yield decision


def _of(run: RunFacts, rules: Rules, days: float, *, is_last: bool) -> Decision | None:
    if run.state == "failed":
        old = days >= rules.failed_days
        return Decision(run, "workspace", f"failed {_ago(days)}") if old else None
    if days >= rules.days and not is_last:
        return Decision(run, "workspace", f"succeeded {_ago(days)}")
    if days >= rules.checkpoint_days:
        return Decision(run, "checkpoints", f"its model was exported {_ago(days)}")
    return None


def _ago(days: float) -> str:
    return f"{days:.0f} days ago" if days >= 2 else f"{days * 24:.0f} hours ago"

"""Recorded outputs, and what a judge told of them."""

from collections.abc import Iterable
from pathlib import Path

from pipelines.doctor.findings import Seen, State

FOLDER = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (FOLDER / name).read_text()


def told(seen: Seen | Iterable[Seen]) -> list[tuple[str, str]]:
    """State and words; whatever is bad must come with a fix, and nothing else with one."""
    all_seen = [seen] if isinstance(seen, Seen) else list(seen)
    for each in all_seen:
        assert bool(each.fix) == (each.state in (State.WARNING, State.PROBLEM)), each
    return [(str(each.state), each.saw) for each in all_seen]

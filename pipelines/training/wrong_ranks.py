"""Which processes got other bits than the rest from the same work; from numbers alone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Statement(NamedTuple):
    """What a process says of something that has the same bits wherever nothing is broken."""

    what: str  # in a word for users, such as "gradient"
    of: int  # the rank that it belongs to
    rank: int  # the process that says it
    bits: int  # a sum of the bits


class Wrong(NamedTuple):
    """Who is wrong, and about what."""

    ranks: tuple[int, ...]  # ascending
    is_known: bool  # if not, only one of them need be wrong
    what: tuple[str, ...]


def is_disputed(said: Iterable[Statement]) -> bool:
    """Return whether statements about the same have different bits."""
    return any(len({each.bits for each in same}) > 1 for same in _by_subject(said))


def find_wrong(rounds: Sequence[Sequence[Statement]]) -> Wrong:
    """Judge by all rounds, each of which has statements of all processes.

    Who contradicts itself is wrong. Each of the others has a vote, and the majority is right. Where
    as many say this as that, nobody knows who is wrong.
    """
    known: set[int] = set()
    suspects: set[int] = set()
    what: list[str] = []
    for same in _by_subject(each for said in rounds for each in said):
        if len({each.bits for each in same}) == 1:
            continue
        what.append(same[0].what)
        bits: dict[int, set[int]] = {}
        for each in same:
            bits.setdefault(each.rank, set()).add(each.bits)
        known |= {rank for rank, own in bits.items() if len(own) > 1}
        votes = {rank: min(own) for rank, own in bits.items() if len(own) == 1}
        counts = Counter(votes.values()).most_common(2)
        if len(counts) == 2 and counts[0][1] == counts[1][1]:
            suspects |= votes.keys()
        elif counts:
            known |= {rank for rank, vote in votes.items() if vote != counts[0][0]}
    ranks = tuple(sorted(known or suspects))
    return Wrong(ranks, bool(known), tuple(dict.fromkeys(what)))


def _by_subject(said: Iterable[Statement]) -> Iterable[list[Statement]]:
    subjects: dict[tuple[str, int], list[Statement]] = {}
    for each in said:
        subjects.setdefault((each.what, each.of), []).append(each)
    return subjects.values()

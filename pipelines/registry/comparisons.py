"""The comparisons that the gate made with the champions of a registered model, in order.

How sure the gate must be depends on how many candidates a champion has met. So a comparison is
written down before it is made, and a run that dies and tries again finds its own and is not
counted twice. An entry is a param such as `compared.00007` of the audit trail's run, which is
written only once (see `audit`): of runs that compare at the same time, on however many machines,
each gets a number of its own.

A candidate that is compared again on other documents gets a second entry, because other documents
are another chance to look better by luck.

Documents wear out, as whoever sees their scores may choose by them. So they can be divided into
parts by their ids, of which one is compared on until it is worn out. A document stays in its part
while the data grow.
"""

import hashlib
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from pipelines.registry import audit, registry
from pipelines.run.verdict import MOST_USES, Turn
from pipelines.tracking import rest

# Each entry names the 32 documents with the least ids. Ids are hashes, so these are a random sample
# which two sets of documents share if they have much in common: of sets of which a tenth is
# shared, 97% are recognised. A data set that grows from week to week is so still the same one.
_SAMPLE = 32


class _Compared(BaseModel):
    """A comparison of a candidate with a champion, both named by their content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    champion: str
    candidate: str
    documents: str  # the hash of all their ids
    sample: tuple[str, ...]  # some of their ids, shortened


def part_of(doc_id: str, parts: int) -> int:
    """Return the part that a held-out document belongs to, from 1; its id is a hash."""
    return int(doc_id[-8:], 16) % parts + 1


def take_turn(
    champion: registry.ModelVersion, candidate: str, documents: Sequence[str], parts: int = 1
) -> Turn:
    """Return the place of a comparison, which is written down if it is a new one.

    It is on the first part of the documents that is not worn out, else on the least used one.

    Args:
        champion: The version that is champion.
        candidate: The hash of the candidate's content.
        documents: The ids of the held-out documents.
        parts: How many parts they are divided into.

    Raises:
        UserError: The run of the audit trail was deleted.
    """
    divided: dict[int, list[str]] = {}
    for doc_id in sorted(documents):
        divided.setdefault(part_of(doc_id, parts), []).append(doc_id)
    possible = {part: _compared(champion, candidate, ids) for part, ids in sorted(divided.items())}
    tags = registry.tags_of(rest.registered_model(champion.name) or {})
    run_id = str(audit.open_trail(champion.name, tags).run_id)
    written = _written(run_id)
    while not (own := [part for part, each in possible.items() if each in written]):
        uses = {part: _uses(each, written) for part, each in possible.items()}
        least_used = min(uses, key=lambda part: uses[part])
        fresh = next((part for part in uses if uses[part] < MOST_USES), least_used)
        # If another run writes this number at the same time, this one reads its entry, and goes on.
        entry = possible[fresh].model_dump_json()
        rest.log_param_once(run_id, _key(len(written) + 1), entry)
        written = _written(run_id)
    this = possible[own[0]]
    so_far = written[: written.index(this) + 1]
    return Turn(
        number=sum(each.champion == this.champion for each in so_far),
        uses=_uses(this, so_far),
        part=own[0],
        parts=parts,
    )


def _compared(champion: registry.ModelVersion, candidate: str, documents: list[str]) -> _Compared:
    """Return the entry of a comparison on these documents, which are in the order of their ids."""
    return _Compared(
        champion=champion.model_hash,
        candidate=candidate,
        documents=hashlib.sha256("\n".join(documents).encode()).hexdigest(),
        sample=tuple(each[:16] for each in documents[:_SAMPLE]),
    )


def _uses(this: _Compared, of: Sequence[_Compared]) -> int:
    """Return how many comparisons used these documents, or enough of them to be recognised."""
    return sum(not set(this.sample).isdisjoint(each.sample) for each in of)


def _written(run_id: str) -> list[_Compared]:
    pairs = rest.run(run_id)["data"].get("params", [])
    params = {each["key"]: each["value"] for each in pairs}
    entries: list[_Compared] = []
    while (text := params.get(_key(len(entries) + 1))) is not None:
        entries.append(_Compared.model_validate_json(text))
    return entries


def _key(number: int) -> str:
    return f"compared.{number:05}"

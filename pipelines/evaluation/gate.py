"""Whether a candidate replaces the champion: a pure decision over scores of the same documents.

Score tables have columns doc_id, bytes and nats, one row a document (`perplexity.py`).
"""

import math

import pyarrow as pa

from pipelines.core.records import Verdict
from pipelines.evaluation.scores import bits_per_byte


def decide(
    candidate_scores: pa.Table,
    champion_scores: pa.Table | None,
    min_improvement: float,
    candidate_hash: str,
    champion_hash: str | None,
) -> Verdict:
    """Compare a candidate with the champion.

    Args:
        candidate_scores: Of the candidate.
        champion_scores: Of the champion on the same documents; None where there is none, or it
            can't be evaluated.
        min_improvement: Bits per byte; the candidate must be better by more than that.
        candidate_hash: Of the candidate's content.
        champion_hash: Of the champion's content; None where there is no champion.

    Raises:
        ValueError: the two were not scored on the same documents.
    """
    ours = bits_per_byte(candidate_scores)
    if not math.isfinite(ours):
        return refuse(candidate_scores, f"the candidate's bits per byte are {ours}")
    if champion_hash is None:
        return _verdict("promoted", f"the first model: {ours:.4f} bits per byte", ours, None)
    if candidate_hash == champion_hash:
        reason = f"the candidate is the champion, byte for byte: {ours:.4f} bits per byte"
        return _verdict("unchanged", reason, ours, ours)
    if champion_scores is None:
        return refuse(candidate_scores, "the champion can't be evaluated")
    theirs = bits_per_byte(champion_scores)
    paired = _paired(candidate_scores, champion_scores)
    numbers = f"{ours:.4f} bits per byte, champion {theirs:.4f}; {paired}"
    if theirs - ours > min_improvement:
        return _verdict("promoted", f"better: {numbers}", ours, theirs)
    demanded = f" by more than {min_improvement:g}" if min_improvement else ""
    return _verdict("refused", f"not better{demanded}: {numbers}", ours, theirs)


def refuse(candidate_scores: pa.Table, reason: str) -> Verdict:
    """A refusal for another reason than a comparison."""
    return _verdict("refused", reason, bits_per_byte(candidate_scores), None)


def _paired(candidate: pa.Table, champion: pa.Table) -> str:
    ours, theirs = _by_document(candidate), _by_document(champion)
    if {id_: size for id_, (size, _) in ours.items()} != {
        id_: size for id_, (size, _) in theirs.items()
    }:
        raise ValueError("candidate and champion were scored on different documents")
    better = sum(nats < theirs[id_][1] for id_, (_, nats) in ours.items())
    return f"better on {better} of the same {len(ours)} documents"


def _by_document(scores: pa.Table) -> dict[str, tuple[int, float]]:
    columns = (scores[name].to_pylist() for name in ("doc_id", "bytes", "nats"))
    return {id_: (size, nats) for id_, size, nats in zip(*columns, strict=True)}


def _verdict(decision: str, reason: str, ours: float, theirs: float | None) -> Verdict:
    return Verdict.model_validate(
        {
            "decision": decision,
            "reason": reason,
            "candidate_bits_per_byte": ours,
            "champion_bits_per_byte": theirs,
        }
    )

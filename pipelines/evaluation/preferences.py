"""Which of two answers a model prefers, on held-out pairs of a chosen and a rejected one.

A reward is what the loss of the recipe compares (`training/preference.py`): how much likelier an
answer became than by the model that training started from, or its log-likelihood a token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.data.documents import load_messages
from pipelines.data.normalize import shared_turns
from pipelines.evaluation.bootstrap import proportion
from pipelines.evaluation.perplexity import score_documents
from pipelines.evaluation.task_scores import TaskRow
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.recipe import PAIRS, SHORT_PAIRS
from pipelines.run.verdict import PairScore

_SIDES = "chosen", "rejected"
_MOST_SHOWN = 5


class Shown(NamedTuple):
    """A pair as a user sees it."""

    prompt: str
    chosen: str
    rejected: str
    generated: str


def score_pairs(
    model: Path, documents: pa.Table, stride: float, reference: Path | None = None
) -> pa.Table:
    """Score both answers of each pair among the documents.

    Args:
        model: A folder with weights, config.json and tokenizer files.
        documents: With columns doc_id, text, messages and rejected.
        stride: Of windows over long documents, as a share of the model's context.
        reference: The folder of the model that training started from, if the loss compares with it.

    Returns:
        Columns doc_id, and for chosen and rejected answers tokens and nats, and nats by the
        reference, 0 without one.
    """
    pairs = documents.filter(pc.is_valid(documents["rejected"]))
    columns: dict[str, object] = {"doc_id": pairs["doc_id"]}
    turns = [list(map(load_messages, pairs[name].to_pylist())) for name in ("messages", "rejected")]
    given = pa.array(map(shared_turns, *turns), pa.int64())
    for side, name in zip(_SIDES, ("messages", "rejected"), strict=True):
        asked = pa.table({"doc_id": pairs["doc_id"], "text": pairs["text"]})
        asked = asked.append_column("messages", pairs[name]).append_column("given", given)
        found = score_documents(model, asked, stride)
        columns |= {f"{side}_{each}": found[each] for each in ("tokens", "nats")}
        before = score_documents(reference, asked, stride)["nats"] if reference else None
        zeros = pa.array(np.zeros(len(pairs)))
        columns[f"{side}_reference_nats"] = zeros if before is None else before
    return pa.table(columns)


def pair_score(scores: pa.Table, by: Preference, confidence: float) -> PairScore | None:
    """Return the figures of a model's scores; None if there are no pairs."""
    if not len(scores):
        return None
    rewards, lengths = _rewards(scores, by), _of_both(scores, "tokens")
    right, short = _is_right(rewards), lengths[0] < lengths[1]
    shares = [
        proportion(int(each.sum()), len(each), confidence) if len(each) else None
        for each in (right, right[short])
    ]
    return PairScore(
        pairs=len(right),
        right=shares[0],
        short_pairs=int(short.sum()),
        right_of_short=shares[1],
        margin=float((rewards[0] - rewards[1]).mean()),
        reward_of_chosen=float(rewards[0].mean()),
        reward_of_rejected=float(rewards[1].mean()),
    )


def pair_rows(scores: pa.Table, by: Preference) -> list[TaskRow]:
    """Return the results as tasks: 1 for a pair whose chosen answer has the larger reward."""
    right, lengths = _is_right(_rewards(scores, by)), _of_both(scores, "tokens")
    rows = []
    for doc_id, holds, short in zip(
        scores["doc_id"].to_pylist(), right, lengths[0] < lengths[1], strict=True
    ):
        rows += [TaskRow(task, doc_id, float(holds)) for task in (PAIRS, SHORT_PAIRS)[: 1 + short]]
    return rows


def show_pairs(model: Path, documents: pa.Table, most_tokens: int) -> list[Shown]:
    """Return some pairs of one question, and what the model answers to it."""
    from pipelines.evaluation.generate import generate

    found: list[tuple[str, str, str]] = []
    pairs = documents.filter(pc.is_valid(documents["rejected"]))
    for row in pairs.select(["messages", "rejected"]).to_pylist():
        chosen, rejected = load_messages(row["messages"]), load_messages(row["rejected"])
        if len(chosen) == len(rejected) == 2 and len(found) < _MOST_SHOWN:
            found.append((chosen[0][1], chosen[1][1], rejected[1][1]))
    made: Sequence[str] = ()
    if found:
        made = generate(model, [prompt for prompt, *_ in found], most_tokens, chat=True)
    return [Shown(*each, text) for each, text in zip(found, made, strict=True)]


def _is_right(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    right: npt.NDArray[np.bool_] = rewards[0] > rewards[1]
    return right


def _rewards(scores: pa.Table, by: Preference) -> npt.NDArray[np.float64]:
    """Return those of chosen and rejected answers, [2, pairs]."""
    likelier = _of_both(scores, "reference_nats") - _of_both(scores, "nats")
    if by.by_token:
        likelier = likelier / np.maximum(_of_both(scores, "tokens"), 1)
    rewards: npt.NDArray[np.float64] = by.beta * likelier
    return rewards


def _of_both(scores: pa.Table, name: str) -> npt.NDArray[np.float64]:
    return np.array([scores[f"{side}_{name}"].to_numpy() for side in _SIDES], np.float64)

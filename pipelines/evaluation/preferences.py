"""Which of two answers a model prefers, on held-out pairs of a chosen and a rejected one.

A reward is what the loss of the recipe compares (`training/preference.py`): how much likelier an
answer became than by the model that training started from, or its log-likelihood a token. Where
answers are labelled and stand by themselves, the missing one has the reward 0: a good answer is to
become likelier, and a bad one less likely. The drift from the first model is the Kullback-Leibler
divergence of the trained one from it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipelines.data.documents import load_messages
from pipelines.data.normalize import shared_turns
from pipelines.evaluation.bootstrap import overall_ratio, proportion
from pipelines.evaluation.perplexity import encode_documents, score_documents
from pipelines.evaluation.task_scores import TaskRow
from pipelines.evaluation.text_codec import EncodedText, TextCodec
from pipelines.models.served import held_model
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.recipe import PAIR_TASKS
from pipelines.run.verdict import PairScore

_SIDES = "chosen", "rejected"
_MOST_SHOWN = 5
_MOST_HELD = 1 << 29  # log-probabilities: 2 GiB a model, 4,000 tokens out of 128,000


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
        Columns doc_id; for chosen and rejected answers tokens and nats, and nats by the reference,
        0 without one; and the drift from it in nats a token over the chosen answer, NaN without one
        or where the log-probabilities of all tokens have no room.
    """
    pairs = documents.filter(pc.is_valid(documents["rejected"]))
    drift = np.full(len(pairs), np.nan)
    columns: dict[str, object] = {"doc_id": pairs["doc_id"], "drift": drift}
    turns = [list(map(load_messages, pairs[name].to_pylist())) for name in ("messages", "rejected")]
    given = pa.array(map(shared_turns, *turns), pa.int64())
    alike = pa.table({"doc_id": pairs["doc_id"], "text": pairs["text"], "given": given})
    asked = [alike.append_column("messages", pairs[name]) for name in ("messages", "rejected")]
    columns |= {f"{side}_reference_nats": np.zeros(len(pairs)) for side in _SIDES}
    codec = TextCodec(model)
    chosen = encode_documents(codec, asked[0]) if reference else []
    logs = []
    for folder, before in ((model, ""), (reference, "reference_")):
        if folder is None:
            continue
        for side, table in zip(_SIDES, asked, strict=True):
            found = score_documents(folder, table, stride)
            columns |= {f"{side}_tokens": found["tokens"], f"{side}_{before}nats": found["nats"]}
        logs.append(_log_probabilities(folder, chosen, codec.end_id))
    for row, (ours, theirs) in enumerate(zip(*logs, strict=False)):  # only with a reference
        drift[row] = (ours.exp() * (ours - theirs)).sum(dim=-1).mean()
    return pa.table(columns)


@torch.inference_mode()
def _log_probabilities(
    folder: Path, documents: Sequence[EncodedText], end_of_text: int
) -> list[torch.Tensor]:
    """Return those of all tokens, in place of each scored one within the context, [scored, V].

    The last documents are left out if there is no room for them.
    """
    model, found, held = held_model(folder), [], 0
    for document in documents:
        tokens = [end_of_text, *document.ids[:-1].tolist()]
        inputs = torch.tensor(tokens)[: model.config.context_length]
        scored = torch.from_numpy(document.scored)[: len(inputs)]
        held += int(scored.sum()) * model.config.vocab_size
        if held > _MOST_HELD:
            break
        logits = model(inputs[None].to(next(model.parameters()).device))[0]
        found.append(logits[scored].float().log_softmax(dim=-1).cpu())
    return found


def pair_score(scores: pa.Table, by: Preference, confidence: float) -> PairScore | None:
    """Return the figures of a model's scores; None if there are no pairs."""
    if not len(scores):
        return None
    rewards, lengths = _rewards(scores, by), _of_both(scores, "tokens")
    right, short = _is_right(rewards), _is_short(lengths)
    chosen, rejected = rewards.sum(axis=1) / np.maximum((lengths > 0).sum(axis=1), 1)
    shares = [
        proportion(int(each.sum()), len(each), confidence) if len(each) else None
        for each in (right, right[short])
    ]
    drift = scores["drift"].to_numpy()
    drift = drift[np.isfinite(drift)]
    return PairScore(
        pairs=len(right),
        right=shares[0],
        short_pairs=int(short.sum()),
        right_of_short=shares[1],
        margin=float(chosen - rejected),
        reward_of_chosen=float(chosen),
        reward_of_rejected=float(rejected),
        drift=overall_ratio(drift, np.ones(len(drift)), confidence) if len(drift) else None,
    )


def pair_rows(scores: pa.Table, by: Preference) -> list[TaskRow]:
    """Return the results as tasks: 1 for a pair whose chosen answer has the larger reward."""
    right, lengths = _is_right(_rewards(scores, by)), _of_both(scores, "tokens")
    rows = []
    for doc_id, holds, short in zip(
        scores["doc_id"].to_pylist(), right, _is_short(lengths), strict=True
    ):
        rows += [TaskRow(task, doc_id, float(holds)) for task in PAIR_TASKS[: 1 + short]]
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


def _is_short(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which pairs of two answers have the shorter one chosen."""
    short: npt.NDArray[np.bool_] = (lengths[0] > 0) & (lengths[0] < lengths[1])
    return short


def _rewards(scores: pa.Table, by: Preference) -> npt.NDArray[np.float64]:
    """Return those of chosen and rejected answers, [2, pairs]."""
    likelier = _of_both(scores, "reference_nats") - _of_both(scores, "nats")
    if by.by_token:
        likelier = likelier / np.maximum(_of_both(scores, "tokens"), 1)
    rewards: npt.NDArray[np.float64] = by.beta * likelier
    return rewards


def _of_both(scores: pa.Table, name: str) -> npt.NDArray[np.float64]:
    return np.array([scores[f"{side}_{name}"].to_numpy() for side in _SIDES], np.float64)

"""Memorisation: how much of the training text can be extracted from a model.

A passage of a training document is extracted if the model, given k tokens of it, greedily continues
with exactly the n tokens that follow (Carlini et al., "Quantifying Memorization Across Neural
Language Models", 2023). The passage is the document's beginning, which the model saw as a beginning
in training however documents were packed; in a conversation, it is the first place where the
assistant speaks long enough.

Greedy text is verbatim exactly if each token is the likeliest one after the true tokens before it.
So one pass over prefix and continuation is enough, and nothing has to be generated.

A model reproduces some text that it did not memorise: a licence, a table, a run of spaces. The same
measure on held-out documents tells how often.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipelines.evaluation.bootstrap import proportion
from pipelines.evaluation.perplexity import batch_tokens, encode_documents
from pipelines.evaluation.text_codec import EncodedText, TextCodec
from pipelines.models.served import Model, held_model
from pipelines.recipe.evaluation_section import Safety
from pipelines.run.verdict import Extraction, Memorisation

Ids = npt.NDArray[np.int64]


class Passage(NamedTuple):
    """Consecutive tokens of one document, and the token before them."""

    doc_id: str
    ids: Ids  # [1 + prefix + continuation]


def measure_memorisation(
    model_folder: Path, training: pa.Table, held_out: pa.Table, asked: Safety, confidence: float
) -> tuple[Memorisation, list[str]]:
    """Return the share of passages that are extracted, and the documents they are from.

    The prefix is at most half of the model's context, and the continuation at most the rest.

    Args:
        model_folder: A folder with weights, config.json and tokenizer files.
        training: Documents in random order; the first ones that are long enough are used.
        held_out: Documents that the model never saw.
        asked: The number of documents, and the lengths of prefix and continuation.
        confidence: The confidence of each bound.

    Returns:
        The figures, and the ids of the training documents that a passage was extracted from.
    """
    codec = TextCodec(model_folder)
    model = held_model(model_folder)
    context = model.config.context_length
    prefix = min(asked.prefix_tokens, context // 2)
    length = min(asked.continuation_tokens, context - prefix)
    shares, extracted = [], []
    for documents in (training, held_out):
        passages = find_passages(codec, documents, asked.documents, prefix, length)
        verbatim = _are_verbatim(model, passages, prefix)
        count, total = int(verbatim.sum()), len(passages)
        share = proportion(count, total, confidence) if total else None
        shares.append(Extraction(passages=total, extracted=count, share=share))
        extracted.append(
            [passage.doc_id for passage, each in zip(passages, verbatim, strict=True) if each]
        )
    found = Memorisation(
        prefix_tokens=prefix, continuation_tokens=length, training=shares[0], held_out=shares[1]
    )
    return found, extracted[0]


def find_passages(
    codec: TextCodec, documents: pa.Table, most: int, prefix: int, length: int
) -> list[Passage]:
    """Return one passage of each document that has one, at most `most`."""
    found: list[Passage] = []
    for first in range(0, len(documents), most):
        part = documents.slice(first, most)
        encoded = encode_documents(codec, part)
        for doc_id, text in zip(part["doc_id"].to_pylist(), encoded, strict=True):
            start = _continuation_start(text, prefix, length)
            if start is not None:
                sequence = np.array([codec.end_id, *text.ids], np.int64)
                found.append(Passage(doc_id, sequence[start - prefix : start + 1 + length]))
        if len(found) >= most:
            break
    return found[:most]


def _continuation_start(text: EncodedText, prefix: int, length: int) -> int | None:
    """Return the first place after a prefix where `length` tokens in a row are scored, or None."""
    if len(text.scored) < prefix + length:
        return None
    before = np.concatenate([[0], np.cumsum(text.scored)])  # scored tokens before each place
    counts = before[prefix + length :] - before[prefix : len(before) - length]
    whole = np.flatnonzero(counts == length)
    return prefix + int(whole[0]) if len(whole) else None


@torch.inference_mode()
def _are_verbatim(model: Model, passages: list[Passage], prefix: int) -> npt.NDArray[np.bool_]:
    """Return whether every token after the prefix is the likeliest one, for each passage, [P]."""
    if not passages:
        return np.zeros(0, bool)
    ids_PS = torch.from_numpy(np.stack([passage.ids for passage in passages]))  # noqa: N806
    at_once = max(1, batch_tokens(model) // ids_PS.shape[1])
    device = next(model.parameters()).device
    verbatim = []
    for start in range(0, len(ids_PS), at_once):
        ids_BS = ids_PS[start : start + at_once]  # noqa: N806
        likeliest_BS = model(ids_BS[:, :-1].to(device)).argmax(dim=-1).cpu()  # noqa: N806
        verbatim.append((likeliest_BS[:, prefix:] == ids_BS[:, prefix + 1 :]).all(dim=1))
    return torch.cat(verbatim).numpy()

"""Perplexity: the nats that a model needs for each held-out document.

A document is scored as it was trained: after `<|endoftext|>`, every token once. Documents longer
than the context are cut into windows, each one stride after the window before. The later window
uses the tokens in the overlap only as context, so that every token except a document's first ones
is predicted from at least that much context. A stride of half the context costs 50% more than one
of three quarters, and gains little. Only the assistant's turns of a conversation are scored.

On a CPU, batches run beside each other, each on one thread. The operations of a small model take
microseconds; where two threads share each of them, they wait for each other at its end, and on a
busy machine this waiting took five times the processor time of the work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F  # noqa: N812

from pipelines.evaluation.held_out_documents import conversations, scored_texts
from pipelines.evaluation.text_codec import EncodedText, TextCodec
from pipelines.loading.dataloader import IGNORED
from pipelines.models.served import Model, held_model

STRIDE = 0.75
_CPU_BATCH_TOKENS = 1024  # more overflows a core's cache; measured with 1M and 10M parameters
_BATCH_TOKENS = 32_768
_LOGITS = 1 << 26  # the most numbers in a batch's logits


@dataclass(frozen=True)
class Window:
    """A part of one document that fits into the context."""

    document: int
    inputs: npt.NDArray[np.int64]  # [S]
    targets: npt.NDArray[np.int64]  # [S], the token after each input or IGNORED


def score_documents(
    model_folder: Path,
    documents: pa.Table,
    stride: float = STRIDE,
) -> pa.Table:
    """Score whole documents with the model in a Hugging Face folder.

    Args:
        model_folder: A folder with weights, config.json and tokenizer files.
        documents: A table with doc_id and text, and with messages if there are conversations.
        stride: The stride of windows over long documents, as a share of the model's context.

    Returns:
        Columns doc_id, bytes (scored bytes of UTF-8), tokens (scored tokens) and nats, one row for
        each document, in the given order.
    """
    codec = TextCodec(model_folder)
    model = held_model(model_folder)
    encoded = encode_documents(codec, documents)
    nats = _document_nats(model, encoded, codec.end_id, stride)
    nats += [document.spelling_nats for document in encoded]
    sizes = [len(text.encode()) for text in scored_texts(documents)]
    return pa.table(
        {
            "doc_id": documents["doc_id"],
            "bytes": pa.array(sizes, pa.int64()),
            "tokens": pa.array([document.scored.sum() for document in encoded], pa.int64()),
            "nats": pa.array(nats, pa.float64()),
        }
    )


def encode_documents(codec: TextCodec, documents: pa.Table) -> list[EncodedText]:
    """Encode all texts at once and all conversations at once, and keep the documents' order."""
    texts: list[str] = documents["text"].to_pylist()
    messages = conversations(documents)
    plain = iter(
        codec.encode_texts([text for text, m in zip(texts, messages, strict=True) if not m])
    )
    # What a pair of conversations has in common counts for none of its answers.
    given = documents["given"].to_pylist() if "given" in documents.column_names else ()
    talks = iter(codec.encode_conversations([m for m in messages if m], given))
    return [next(talks) if m else next(plain) for m in messages]


def _document_nats(
    model: Model, documents: Sequence[EncodedText], end_of_text: int, stride: float
) -> npt.NDArray[np.float64]:
    """Return the nats of each document's scored tokens, [documents]."""
    context = model.config.context_length
    windows = [
        window
        for index, document in enumerate(documents)
        for window in _windows(index, document, end_of_text, context, stride)
    ]
    nats = np.zeros(len(documents))
    batches = list(_batches(windows, batch_tokens(model)))
    score = partial(_window_nats, model, padding=end_of_text)
    at_once = _at_once(model, batches)
    for batch, sums in zip(batches, _map_batches(score, batches, at_once), strict=True):
        np.add.at(nats, [window.document for window in batch], sums)
    return nats


def _at_once(model: Model, batches: list[list[Window]]) -> int:
    """Return how many batches to score at the same time: on a CPU as many as their logits allow."""
    if not batches or not _on_cpu(model):
        return 1
    most = max(len(batch) * len(batch[0].inputs) for batch in batches)
    return min(torch.get_num_threads(), len(batches), _LOGITS // (most * model.config.vocab_size))


def _map_batches(
    score: Callable[[list[Window]], npt.NDArray[np.float64]],
    batches: list[list[Window]],
    at_once: int,
) -> Iterator[npt.NDArray[np.float64]]:
    """Score each batch and yield the results in order, with the threads divided among them."""
    if at_once <= 1:
        yield from map(score, batches)
        return
    threads = torch.get_num_threads()
    divide = partial(torch.set_num_threads, threads // at_once)
    try:
        with ThreadPoolExecutor(at_once, initializer=divide) as pool:
            yield from pool.map(score, batches)
    finally:
        torch.set_num_threads(threads)


def _windows(
    number: int, document: EncodedText, end_of_text: int, context: int, stride: float
) -> Iterator[Window]:
    """Cut a document so that each token to be scored is a target in exactly one window."""
    sequence = np.array([end_of_text, *document.ids], np.int64)
    successors = np.where(document.scored, sequence[1:], IGNORED)
    overlap = min(int(context * (1 - stride)), context - 1)
    done = 0
    while done < len(successors):
        start = max(done - overlap, 0)
        end = min(start + context, len(successors))
        targets = successors[start:end].copy()
        targets[: done - start] = IGNORED
        if (targets != IGNORED).any():
            yield Window(number, sequence[start:end], targets)
        done = end


def batch_tokens(model: Model) -> int:
    """Return how many tokens to give a model at once for the best speed, if their logits fit."""
    most = _CPU_BATCH_TOKENS if _on_cpu(model) else _BATCH_TOKENS
    return min(most, _LOGITS // model.config.vocab_size)


def _on_cpu(model: Model) -> bool:
    return next(model.parameters()).device.type == "cpu"


def _batches(windows: list[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Yield batches of windows of similar length, the longest first, to need little padding."""
    rest = sorted(windows, key=lambda window: len(window.inputs), reverse=True)
    while rest:
        count = max(1, batch_tokens // len(rest[0].inputs))
        yield rest[:count]
        rest = rest[count:]


@torch.inference_mode()  # in each thread
def _window_nats(model: Model, batch: list[Window], padding: int) -> npt.NDArray[np.float64]:
    """Return the nats of each window's targets, [B].

    Padding is on the right, where a causal model's earlier positions don't see it.
    """
    shape = (len(batch), len(batch[0].inputs))  # the longest comes first
    inputs, targets = np.full(shape, padding), np.full(shape, IGNORED)
    for row, window in enumerate(batch):
        inputs[row, : len(window.inputs)] = window.inputs
        targets[row, : len(window.targets)] = window.targets
    device = next(model.parameters()).device
    inputs_BS = torch.from_numpy(inputs).to(device)  # noqa: N806
    targets_BS = torch.from_numpy(targets).to(device)  # noqa: N806
    if inputs.size * model.config.vocab_size > _LOGITS:  # one window alone, of a long context
        return np.array([model(inputs_BS, targets_BS=targets_BS).item()])
    logits_BSV = model(inputs_BS)  # noqa: N806
    nats_P = F.cross_entropy(  # noqa: N806
        logits_BSV.float().flatten(0, 1),
        targets_BS.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    nats_BS = nats_P.view(shape)  # noqa: N806
    sums: npt.NDArray[np.float64] = nats_BS.sum(dim=1, dtype=torch.float64).cpu().numpy()
    return sums

"""One figure from a table of per-document scores (doc_id, bytes, tokens, nats)."""

import math

import pyarrow as pa

_MOST = 709  # exp overflows beyond; a diverged model gets there, or to nan


def bits_per_byte(scores: pa.Table) -> float:
    """Over all documents; comparable between tokenizers."""
    return _total(scores, "nats") / math.log(2) / _total(scores, "bytes")


def token_perplexity(scores: pa.Table) -> float:
    """Over all tokens; comparable only where the tokenizer is the same."""
    nats = _total(scores, "nats") / _total(scores, "tokens")
    return math.exp(nats) if nats < _MOST else math.inf


def _total(scores: pa.Table, column: str) -> float:
    return math.fsum(scores[column].to_pylist())

"""How likely a text is after another one, the basis of tests on pairs of sentences.

The log-likelihood of a continuation after a prompt is that of both together less that of the prompt
alone, each scored as a document. So it doesn't matter where a tokenizer puts the border between the
two, and models with different tokenizers are judged alike.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipelines.evaluation.perplexity import STRIDE, score_documents


def continuation_bits(
    model_folder: Path, asked: Iterable[tuple[str, str]], stride: float = STRIDE
) -> dict[tuple[str, str], float]:
    """Bits that a continuation takes once the prompt is known, by (prompt, continuation).

    Each text is scored once, however often it occurs; without any, no model is loaded.
    """
    wanted = sorted(set(asked))
    if not wanted:
        return {}
    texts = sorted({text for prompt, rest in wanted for text in (prompt, prompt + rest)})
    scores = score_documents(model_folder, pa.table({"doc_id": texts, "text": texts}), stride)
    nats = dict(zip(texts, scores["nats"].to_pylist(), strict=True))
    return {
        (prompt, rest): (nats[prompt + rest] - nats[prompt]) / math.log(2)
        for prompt, rest in wanted
    }

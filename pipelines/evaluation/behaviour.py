"""Whether a model behaves as a recipe's tests say: minimum functionality, invariance, direction.

Each case is judged by the log-likelihood of a continuation after a prompt: that of both together
less that of the prompt alone, each scored as a document. So it doesn't matter where a tokenizer
puts the border between the two, and models with different tokenizers are judged alike.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from pipelines.core.recipe_behaviour import Behaviour, BehaviourCase
from pipelines.core.verdict import BehaviourScore
from pipelines.evaluation.perplexity import STRIDE, score_documents


def run_tests(
    model_folder: Path, tests: Sequence[Behaviour], stride: float = STRIDE
) -> tuple[BehaviourScore, ...]:
    """How many cases of each test a model passes, in the tests' order."""
    if not tests:
        return ()
    texts = sorted({text for test in tests for case in test.cases for text in _texts(case)})
    scores = score_documents(model_folder, pa.table({"doc_id": texts, "text": texts}), stride)
    bits = {
        text: nats / math.log(2)
        for text, nats in zip(texts, scores["nats"].to_pylist(), strict=True)
    }
    return tuple(
        BehaviourScore(
            name=test.name,
            kind=test.kind,
            cases=len(test.cases),
            passed=sum(_passes(test, case, bits) for case in test.cases),
        )
        for test in tests
    )


def _texts(case: BehaviourCase) -> Iterator[str]:
    for prompt in (case.prompt, case.changed):
        if prompt is not None:
            yield from (prompt, prompt + case.continuation)
    if case.wrong is not None:
        yield case.prompt + case.wrong


def _passes(test: Behaviour, case: BehaviourCase, bits: Mapping[str, float]) -> bool:
    before = _bits_after(case.prompt, case.continuation, bits)
    if test.kind == "minimum_functionality":
        return before < _bits_after(case.prompt, str(case.wrong), bits)
    saved = before - _bits_after(str(case.changed), case.continuation, bits)
    if test.kind == "invariance":
        return abs(saved) <= test.max_bits
    return saved > 0 if test.direction == "up" else saved < 0


def _bits_after(prompt: str, continuation: str, bits: Mapping[str, float]) -> float:
    """That the continuation takes once the prompt is known."""
    return bits[prompt + continuation] - bits[prompt]

"""Behavioural tests of a recipe: minimum functionality, invariance and directional expectation.

Each case is judged by the log-likelihood of a continuation after a prompt, which is also the basis
of tests on pairs of sentences. It is the log-likelihood of both texts together minus that of the
prompt alone, each scored as a document. So it doesn't matter where a tokenizer puts the border
between the two, and models with different tokenizers are judged by the same measure.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from pipelines.evaluation.perplexity import STRIDE, score_documents
from pipelines.recipe.evaluation_section import Behaviour, BehaviourCase
from pipelines.run.verdict import BehaviourScore


def continuation_bits(
    model_folder: Path, asked: Iterable[tuple[str, str]], stride: float = STRIDE
) -> dict[tuple[str, str], float]:
    """Return the bits that each (prompt, continuation) pair's continuation takes after its prompt.

    Each text is scored once, however often it occurs. If there are no pairs, no model is loaded.
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


def run_tests(
    model_folder: Path, tests: Sequence[Behaviour], stride: float = STRIDE
) -> tuple[BehaviourScore, ...]:
    """Return how many cases of each test the model passes, in the order of the tests."""
    asked = (pair for test in tests for case in test.cases for pair in _asked(case))
    bits = continuation_bits(model_folder, asked, stride)
    return tuple(
        BehaviourScore(
            name=test.name,
            kind=test.kind,
            cases=len(test.cases),
            passed=sum(_passes(test, case, bits) for case in test.cases),
        )
        for test in tests
    )


def _asked(case: BehaviourCase) -> Iterator[tuple[str, str]]:
    yield case.prompt, case.continuation
    if case.changed is not None:
        yield case.changed, case.continuation
    if case.wrong is not None:
        yield case.prompt, case.wrong


def _passes(test: Behaviour, case: BehaviourCase, bits: Mapping[tuple[str, str], float]) -> bool:
    before = bits[case.prompt, case.continuation]
    if test.kind == "minimum_functionality":
        return before < bits[case.prompt, str(case.wrong)]
    saved = before - bits[str(case.changed), case.continuation]
    if test.kind == "invariance":
        return abs(saved) <= test.max_bits
    return saved > 0 if test.direction == "up" else saved < 0

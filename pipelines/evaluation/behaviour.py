"""Whether a model behaves as a recipe's tests say: minimum functionality, invariance, direction.

Each case is judged by the log-likelihood of a continuation after a prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipelines.core.recipe_behaviour import Behaviour, BehaviourCase
from pipelines.core.verdict import BehaviourScore
from pipelines.evaluation.continuations import continuation_bits
from pipelines.evaluation.perplexity import STRIDE


def run_tests(
    model_folder: Path, tests: Sequence[Behaviour], stride: float = STRIDE
) -> tuple[BehaviourScore, ...]:
    """How many cases of each test a model passes, in the tests' order."""
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

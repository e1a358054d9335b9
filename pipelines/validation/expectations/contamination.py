"""The expectation that texts hold nothing of the evaluation sets."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    column_condition_partial,
)

from pipelines.data.cleaning.decontaminate import EvaluationNgrams
from pipelines.validation.expectations.sentence import ReasonedRows


class ValuesUncontaminated(ColumnMapMetricProvider):
    """Whether a text shares fewer n-grams with the evaluation texts than count as contamination."""

    condition_metric_name = "column_values.uncontaminated"
    condition_value_keys = ("ngrams", "min_shared")

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column: Any, ngrams: str, min_shared: int, **_: Any) -> Any:
        evaluation = _load(ngrams)
        return column.map(lambda text: evaluation.overlap(text).shared < min_shared)


class ExpectColumnValuesToNotHoldEvaluationText(ReasonedRows):
    """Expect texts to share no n words in a row with an evaluation set (13 as in GPT-3, 2020).

        EvaluationNgrams.build(["What is the capital of …"], n=13).save(Path("exam.npy"))
        batch.validate(
            ExpectColumnValuesToNotHoldEvaluationText(column="text", ngrams="exam.npy")
        )

    Args:
        column: of texts.
        ngrams: a file that `EvaluationNgrams.save` wrote.
        name: what the evaluation set is called.
        min_shared: n-grams from which a text counts as contaminated.
        mostly: the share of rows that must not be.
    """

    ngrams: str
    name: str = "the evaluation set"
    min_shared: int = 1

    map_metric = "column_values.uncontaminated"
    success_keys = ("ngrams", "min_shared", "mostly")

    def sentence(self) -> str:
        """Return what is demanded."""
        words = _load(self.ngrams).n
        shared = f"{self.min_shared} times " if self.min_shared > 1 else ""
        return (
            f"values must not share {words} words in a row {shared}with {self.name}{self._almost()}"
        )

    def reason(self, value: Any) -> str:
        """Return how much was found."""
        evaluation = _load(self.ngrams)
        return f"shares {evaluation.overlap(value).shared} {evaluation.n}-grams with {self.name}"


@lru_cache(maxsize=8)
def _load(path: str) -> EvaluationNgrams:
    return EvaluationNgrams.load(Path(path))

"""The expectation that a corpus holds its languages in the shares that were meant."""

from collections import Counter
from typing import Any

from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import ColumnAggregateExpectation
from great_expectations.expectations.metrics import (
    ColumnAggregateMetricProvider,
    column_aggregate_value,
)

from pipelines.data.cleaning.text_statistics import detect_language
from pipelines.validation.expectations.sentence import AssessedVariant, percent

_SHOWN = 5  # languages of an observed mix


class LanguageMix(ColumnAggregateMetricProvider):
    """The share of each language, the likeliest of each text counting: `{code: share}`."""

    metric_name = "column.language_mix"

    @column_aggregate_value(engine=PandasExecutionEngine, filter_column_isnull=True)
    def _pandas(cls, column: Any, **_: Any) -> dict[str, float]:
        counts = Counter(detect_language(text).code for text in column)
        return {code: count / counts.total() for code, count in counts.most_common()}


class ExpectColumnLanguageMixToBeWithin(AssessedVariant, ColumnAggregateExpectation):
    """Expect the share of texts in each language to lie within its bounds.

        batch.validate(
            ExpectColumnLanguageMixToBeWithin(
                column="text", bounds={"en": (0.9, 1.0), "de": (0.0, 0.05)}
            )
        )

    Args:
        column: of texts.
        bounds: by ISO 639 code, the least and the largest share, inclusive; languages that are not
            named are not bounded.
    """

    bounds: dict[str, tuple[float, float]]

    metric_dependencies = ("column.language_mix",)
    success_keys = ("bounds",)

    def sentence(self) -> str:
        """Return what is demanded."""
        shares = (
            f"{code} {percent(least)} to {percent(most)}"
            for code, (least, most) in self.bounds.items()
        )
        return f"the languages of the texts must have these shares: {', '.join(shares)}."

    @classmethod
    def shown(cls, observed: Any) -> str:
        """Return the largest shares."""
        shares = [f"{code} {percent(share)}" for code, share in observed.items()]
        return ", ".join([*shares[:_SHOWN], *["…"][: max(len(shares) - _SHOWN, 0)]])

    def decide(self, metrics: dict[str, Any]) -> tuple[bool, Any]:
        """Return every share within its bounds; the shares."""
        mix = metrics["column.language_mix"]
        within = all(
            least <= mix.get(code, 0) <= most for code, (least, most) in self.bounds.items()
        )
        return within, mix

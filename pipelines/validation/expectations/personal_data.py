"""The expectation that no personal data and no secrets are left in texts."""

from functools import lru_cache
from typing import Any

from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    column_condition_partial,
)

from pipelines.data.cleaning.pii import Scrubber
from pipelines.recipe.cleaning_section import Pii
from pipelines.validation.expectations.sentence import ReasonedRows

_ALL = Pii()


class ValuesWithoutPii(ColumnMapMetricProvider):
    """Whether the scrubber finds nothing in a text."""

    condition_metric_name = "column_values.without_pii"
    condition_value_keys = ("kinds", "phone_region")

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column: Any, kinds: tuple[str, ...], phone_region: str, **_: Any) -> Any:
        return column.map(lambda text: not _found(text, kinds, phone_region))


class ExpectColumnValuesToHoldNoPii(ReasonedRows):
    """Expect a scrubber to find nothing: no e-mail address, phone or card number, key or the like.

        batch.validate(ExpectColumnValuesToHoldNoPii(column="text"))
        batch.validate(
            ExpectColumnValuesToHoldNoPii(column="text", kinds=["email", "secret"], mostly=0.999)
        )

    Args:
        column: of texts.
        kinds: what is looked for, of `data.pii.kinds`; all by default.
        phone_region: the country in which a phone number without + is read.
        mostly: the share of rows that must be clean.
    """

    kinds: tuple[str, ...] = _ALL.kinds
    phone_region: str = _ALL.phone_region

    map_metric = "column_values.without_pii"
    success_keys = ("kinds", "phone_region", "mostly")

    def sentence(self) -> str:
        """Return what is demanded."""
        return f"values must hold no personal data ({', '.join(self.kinds)}){self._almost()}"

    def reason(self, value: Any) -> str:
        """Return what was found, without showing it."""
        found = _found(value, self.kinds, self.phone_region)
        return "holds " + ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))


def _found(text: str, kinds: tuple[str, ...], phone_region: str) -> dict[str, int]:
    return _scrubber(tuple(kinds), phone_region).scrub(text).counts


@lru_cache(maxsize=4)
def _scrubber(kinds: tuple[str, ...], phone_region: str) -> Scrubber:
    recipe = {"action": "report", "kinds": kinds, "phone_region": phone_region}
    return Scrubber(Pii.model_validate(recipe))

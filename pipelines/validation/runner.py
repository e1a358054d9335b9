"""Runs suites over frames, and says in one line what failed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.data.documents import RowGroup

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.core import ExpectationSuiteValidationResult
    from great_expectations.expectations import Expectation

BAD_ROWS = 1000  # of each expectation that are named, at most
_EXAMPLES = 3  # of them in a line


@dataclass(frozen=True)
class Check:
    """A named frame and what is expected of it."""

    name: str
    about: str  # for users: what a row is
    frame: "pd.DataFrame"
    expectations: "list[Expectation]"
    groups: Sequence[RowGroup] = ()  # by the column `group`, where the frame lacks the texts


@dataclass(frozen=True)
class Finding:
    """What came of one expectation.

    Attributes:
        bad_rows: positions in the check's frame of the first rows that it does not hold of; an
            expectation that asks for most of the rows may hold as a whole all the same.
    """

    check: Check
    expectation: "Expectation"
    success: bool
    observed: str
    bad_rows: tuple[int, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it is about; none for one about the whole table."""
        names = (getattr(self.expectation, key, None) for key in _COLUMNS)
        return tuple(name for name in names if name)

    def describe(self) -> str:
        """`documents: expect_column_values_to_be_null of mistaken_id: 2 of 90 rows, such as …`."""
        of = f" of {' and '.join(self.columns)}" if self.columns else ""
        return (
            f"{self.check.name}: {self.expectation.expectation_type}{of}{self._demanded()}: "
            f"{self.observed}{self._examples()}"
        )

    def reason(self, row: int) -> str:
        """Return why a bad row is bad."""
        values = self.check.frame.iloc[row]
        if explain := getattr(self.expectation, "reason", None):
            return str(explain(values[self.columns[0]]))
        return " and ".join(f"{name} is {values[name]}" for name in self.columns)

    def _demanded(self) -> str:
        if sentence := getattr(self.expectation, "sentence", None):
            return f" ({sentence().rstrip('.')})"
        given = self.expectation.configuration.kwargs
        shown = {key: value for key, value in given.items() if key not in (*_COLUMNS, "batch_id")}
        return f" ({', '.join(f'{key}={value}' for key, value in shown.items())})" if shown else ""

    def _examples(self) -> str:
        ids = self.check.frame.get("doc_id")
        found = [
            _short(
                self.reason(row)
                if ids is None
                else f"{str(ids.iloc[row])[:12]}: {self.reason(row)}"
            )
            for row in self.bad_rows[:_EXAMPLES]
        ]
        return f", such as {'; '.join(found)}" if found else ""


_COLUMNS = ("column", "column_A", "column_B")


def run_check(check: Check) -> "tuple[list[Finding], ExpectationSuiteValidationResult]":
    """Hold a frame against its expectations: the findings in their order, and the whole result."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the package is imported
    import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(),
        progress_bars=ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    context = gx.get_context(mode="ephemeral", project_config=config)
    source = context.data_sources.add_pandas(check.name)
    whole = source.add_dataframe_asset(check.name).add_batch_definition_whole_dataframe("whole")
    suite = gx.ExpectationSuite(name=check.name, expectations=check.expectations)
    result = whole.get_batch({"dataframe": check.frame}).validate(
        context.suites.add(suite),
        result_format={
            "result_format": "SUMMARY",  # COMPLETE would keep every bad row
            "partial_unexpected_count": BAD_ROWS,
            "exclude_unexpected_values": True,  # they may be texts, with what must not be shown
        },
    )
    by_id = {each.expectation_config.id: each for each in result.results}
    return [_finding(check, each, by_id[each.id]) for each in suite.expectations], result


def _finding(check: Check, expectation: "Expectation", result: Any) -> Finding:
    bad = result.result.get("partial_unexpected_index_list") or ()
    return Finding(
        check=check,
        expectation=expectation,
        success=result.success,
        observed=_observed(expectation, result),
        bad_rows=tuple(int(row) for row in bad),
    )


def _observed(expectation: "Expectation", result: Any) -> str:
    found = result.result
    if found.get("observed_value") is not None:
        shown = getattr(expectation, "shown", str)
        return f"observed {shown(found['observed_value'])}"
    if "element_count" in found:
        return f"{found['unexpected_count']} of {found['element_count']} rows"
    return " ".join(str(result.exception_info).split())  # the expectation itself broke


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"

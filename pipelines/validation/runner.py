"""Runs suites over frames, writes Data Docs, and says in one line what failed."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations import Checkpoint
    from great_expectations.core import ExpectationValidationResult
    from great_expectations.data_context import EphemeralDataContext
    from great_expectations.expectations import Expectation

SITE = "data_docs"
INDEX = "index.html"
# The same data gives the same pages, which the stage cache keeps by content: no clock, no uuids.
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_EXAMPLES = 3  # bad values kept of each expectation


@dataclass(frozen=True)
class Check:
    """A named frame and what is expected of it."""

    name: str
    frame: "pd.DataFrame"
    expectations: "list[Expectation]"


def run_checks(checks: Sequence[Check], data_docs: Path) -> int:
    """Run every check, write the Data Docs site to `data_docs`, and count the expectations.

    Raises:
        UserError: an expectation failed; the line names the first, what was observed and the page.
    """
    context = _context(data_docs)
    failures = []
    for check in checks:
        failures += [
            _describe(check, result) for result in _run(context, check) if not result.success
        ]
    _make_reproducible(data_docs)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise UserError(f"{failures[0]}{more}; see {data_docs / INDEX}")
    return sum(len(check.expectations) for check in checks)


def _context(data_docs: Path) -> "EphemeralDataContext":
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the package is imported
    import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    site = {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(data_docs),
        },
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }
    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(),
        data_docs_sites={SITE: site},
        progress_bars=ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    return gx.get_context(mode="ephemeral", project_config=config)


def _run(context: "EphemeralDataContext", check: Check) -> "list[ExpectationValidationResult]":
    from great_expectations import RunIdentifier

    result = _checkpoint(context, check).run(
        batch_parameters={"dataframe": check.frame},
        run_id=RunIdentifier(run_name=SITE, run_time=_NO_TIME),
    )
    found = [each for suite in result.run_results.values() for each in suite.results]
    order = [expectation.id for expectation in check.expectations]
    return sorted(found, key=lambda each: order.index(each.expectation_config.id))


def _checkpoint(context: "EphemeralDataContext", check: Check) -> "Checkpoint":
    import great_expectations as gx
    from great_expectations.checkpoint.actions import UpdateDataDocsAction

    source = context.data_sources.add_pandas(check.name)
    batch = source.add_dataframe_asset(check.name).add_batch_definition_whole_dataframe("whole")
    suite = context.suites.add(
        gx.ExpectationSuite(name=check.name, expectations=check.expectations)
    )
    definition = gx.ValidationDefinition(name=check.name, data=batch, suite=suite)
    return context.checkpoints.add(
        gx.Checkpoint(
            name=check.name,
            validation_definitions=[context.validation_definitions.add(definition)],
            actions=[UpdateDataDocsAction(name=SITE, site_names=[SITE])],
            # COMPLETE would keep every bad row.
            result_format={"result_format": "SUMMARY", "partial_unexpected_count": _EXAMPLES},
        )
    )


def _describe(check: Check, result: "ExpectationValidationResult") -> str:
    """`documents: expect_column_values_to_be_unique of doc_id: 2 of 90 values, such as 'ab3…'`."""
    config = result.expectation_config
    kwargs: dict[str, Any] = dict(config.kwargs)
    columns = [kwargs.pop(key) for key in ("column", "column_A", "column_B") if key in kwargs]
    kwargs.pop("batch_id", None)
    demanded = ", ".join(f"{key}={value}" for key, value in kwargs.items() if value is not None)
    return (
        f"{check.name}: {config.type}"
        f"{' of ' + ' and '.join(columns) if columns else ''}"
        f"{' (' + demanded + ')' if demanded else ''}: {_observed(result)}"
    )


def _observed(result: "ExpectationValidationResult") -> str:
    found = result.result
    if "observed_value" in found:
        return f"observed {found['observed_value']}"
    if "unexpected_count" in found:
        examples = "; ".join(_short(value) for value in found.get("partial_unexpected_list", ()))
        such_as = f", such as {examples}" if examples else ""
        return f"{found['unexpected_count']} of {found['element_count']} rows{such_as}"
    return " ".join(str(result.exception_info).split())  # the expectation itself broke


def _short(value: Any) -> str:
    text = " and ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _make_reproducible(data_docs: Path) -> None:
    """Take times and random ids out of the pages, and the animations that no page shows."""
    zero = _NO_TIME.strftime("%Y%m%dT%H%M%S.%fZ")
    for page in data_docs.rglob("*.html"):
        text = _TIME.sub(zero, page.read_text(encoding="utf-8"))
        for number, found in enumerate(dict.fromkeys(_UUID.findall(text))):
            text = text.replace(found, f"id-{number}")
        page.write_text(text, encoding="utf-8")
    for animation in (data_docs / "static" / "images").glob("*.gif"):
        animation.unlink()

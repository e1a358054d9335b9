"""The Data Docs page: Great Expectations' own tables of results on one page that fetches nothing.

Their site loads styles and scripts from half a dozen hosts, its index is drawn by a script, and
its links do not work inside an artifact viewer. This page opens anywhere, and the same results
give the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import StrictUndefined, Template

from pipelines.data.cleaning.pii import Scrubber
from pipelines.recipe.cleaning_section import Pii
from pipelines.validation.runner import Check

if TYPE_CHECKING:
    from great_expectations.core import ExpectationSuiteValidationResult

    from pipelines.validation.expectations.conversations import Piece

TEMPLATE = Path(__file__).with_name("data_docs.html.j2")


def render_page(
    results: "Sequence[tuple[Check, ExpectationSuiteValidationResult]]", note: str = ""
) -> str:
    """Return the results of all checks as one page of HTML; `note` is a sentence for its top."""
    sections = [
        {
            "name": check.name,
            "about": check.about,
            "kind": "good" if result.success else "bad",
            "held": result.statistics["successful_expectations"],
            "total": len(check.expectations),
            "tables": _tables(result, number),  # HTML, escaped by Great Expectations
            "sample": _sample(check),
        }
        for number, (check, result) in enumerate(results)
    ]
    statistics = [result.statistics for _, result in results]
    template = Template(
        TEMPLATE.read_text(encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    page: str = template.render(
        note=note,
        held=sum(each["successful_expectations"] for each in statistics),
        total=sum(each["evaluated_expectations"] for each in statistics),
        sections=sections,
    )
    return page


def _sample(check: Check) -> "list[Piece]":
    """Return the first good conversation where a check is of some, without personal data."""
    from pipelines.validation.expectations.conversations import (
        ExpectColumnValuesToBeWellFormedConversations,
        Piece,
    )

    for demand in check.expectations:
        if isinstance(demand, ExpectColumnValuesToBeWellFormedConversations):
            rows = check.frame.dropna(subset=demand.column).to_dict("records")
            good = next((row for row in rows if demand.reason(row[demand.column]) is None), None)
            pieces = demand.pieces(good[demand.column], good.get("rejected")) if good else []
            scrubber = Scrubber(Pii(action="mask"))
            return [Piece(scrubber.scrub(piece.text).text, piece.trained) for piece in pieces]
    return []


def _tables(result: "ExpectationSuiteValidationResult", number: int) -> str:
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view import DefaultJinjaSectionView

    document = ValidationResultsPageRenderer().render(result).to_json_dict()
    view = DefaultJinjaSectionView()
    # The first section tells when and where it ran, which is not the same in every run.
    return "".join(
        view.render({"section": section, "section_loop": {"index": f"{number}-{index}"}})
        for index, section in enumerate(document["sections"][1:])
    )

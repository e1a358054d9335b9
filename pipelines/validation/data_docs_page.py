"""The Data Docs page: Great Expectations' own tables of results on one page that fetches nothing.

Their site loads styles and scripts from half a dozen hosts, its index is drawn by a script, and
its links do not work inside an artifact viewer. This page opens anywhere, and the same results
give the same bytes.
"""

import html
from collections.abc import Sequence
from string import Template
from typing import TYPE_CHECKING

from pipelines.validation.runner import Check

if TYPE_CHECKING:
    from great_expectations.core import ExpectationSuiteValidationResult

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1c2430; --soft: #5d6775; --line: #e3e5e8;
  --good: #2b8a4b; --bad: #c8372d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b1; --line: #2c3541;
    --good: #5cc480; --bad: #f0766c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 70rem; padding: 2.5rem 1.25rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 0; font-size: 1.1rem; }
h5 { margin: 1rem 0 .2rem; font-size: .95rem; }
p { margin: .3rem 0; color: var(--soft); }
body > section {
  margin-top: 1.25rem; padding: 1.25rem 1.5rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; overflow-x: auto;
}
table { width: 100%; border-collapse: collapse; }
th, td { padding: .3rem .5rem; text-align: left; font-weight: 400; vertical-align: top; }
th { color: var(--soft); font-size: .85rem; }
th:first-child, td:first-child { width: 4rem; padding-left: 0; }
th:last-child, td:last-child { width: 30%; overflow-wrap: anywhere; }
tbody tr > * { border-top: 1px solid var(--line); }
.badge { font-weight: 650; font-variant-numeric: tabular-nums; }
i.text-success::before { content: "\\2713"; color: var(--good); font: 700 1.1rem system-ui; }
i.text-danger::before { content: "\\2717"; color: var(--bad); font: 700 1.1rem system-ui; }
.good { color: var(--good); }
.bad, strong.text-danger { color: var(--bad); }
code { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data Docs</title>
<style>$style</style>
</head>
<body>
<h1>Data Docs</h1>
<p>$held of $total expectations hold. $note</p>
$sections
</body>
</html>
""")

_SECTION = Template("""<section>
<h2>$name <span class="$kind">$held of $total</span></h2>
<p>$about</p>
$tables
</section>
""")


def render_page(
    results: "Sequence[tuple[Check, ExpectationSuiteValidationResult]]", note: str = ""
) -> str:
    """The results of all checks as one page of HTML; `note` is a sentence for its top."""
    sections = []
    for number, (check, result) in enumerate(results):
        held = result.statistics["successful_expectations"]
        sections.append(
            _SECTION.substitute(
                name=html.escape(check.name),
                about=html.escape(check.about),
                kind="good" if result.success else "bad",
                held=held,
                total=len(check.expectations),
                tables=_tables(result, number),
            )
        )
    statistics = [result.statistics for _, result in results]
    return _PAGE.substitute(
        style=_STYLE,
        note=html.escape(note),
        held=sum(each["successful_expectations"] for each in statistics),
        total=sum(each["evaluated_expectations"] for each in statistics),
        sections="".join(sections),
    )


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

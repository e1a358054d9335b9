"""Pages that need nothing else: one file of HTML with its styles inside, that fetches nothing.

Jinja2 escapes every value that is put in, so text of documents, models and recipes stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

BASE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{% block title %}{% endblock %}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1c2430; --soft: #5d6775; --line: #e3e5e8;
  --bar: #c3cad3; --model: #2672b0; --champion: #b0600a; --good: #23763f; --bad: #c0332a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b1; --line: #2c3541;
    --bar: #47525f; --model: #5aa7e6; --champion: #e39a4b; --good: #5cc480; --bad: #f0766c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 .8rem; font-size: 1.1rem; }
h3 { margin: 1.1rem 0 .3rem; font-size: .85rem; font-weight: 400; color: var(--soft); }
p { margin: .3rem 0; color: var(--soft); }
section {
  margin-top: 1.25rem; padding: 1.25rem 1.5rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; overflow-x: auto;
}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 1rem; }
.figures b {
  display: block; font-size: 1.6rem; line-height: 1.3; font-variant-numeric: tabular-nums;
}
.figures span { display: block; color: var(--soft); font-size: .85rem; }
.figures .first b { color: var(--model); }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .3rem .5rem; text-align: left; font-weight: 400; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
thead th { color: var(--soft); font-size: .85rem; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre {
  margin: .6rem 0 0; padding: .8rem 1rem; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
pre b { color: var(--model); }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); }
details > div { overflow-x: auto; }
.total > *, .total { font-weight: 650; }
.total small { font-weight: 400; }
tbody th, .wrap td { overflow-wrap: anywhere; min-width: 6rem; }
.bars { margin: 0; padding: 0; list-style: none; }
.bars li {
  display: grid; grid-template-columns: 12rem 1fr 11rem; gap: 0 .9rem; align-items: center;
  padding: .16rem 0;
}
.bars .name { overflow-wrap: anywhere; line-height: 1.25; }
.bars .text { text-align: right; font-variant-numeric: tabular-nums; line-height: 1.25; }
.bars .text small { display: block; color: var(--soft); }
.bars svg { display: block; width: 100%; height: 1.35rem; }
svg * { vector-effect: non-scaling-stroke; }
.bar { fill: var(--bar); }
.model .bar, .better .bar { fill: var(--model); }
.theirs .bar, .worse .bar { fill: var(--champion); }
.better .bar, .worse .bar { opacity: .55; }
.regressed .bar, .beyond .bar { fill: var(--bad); opacity: .8; }
.regressed .text, .beyond .text { color: var(--bad); }
.whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.zero { stroke: var(--soft); stroke-width: 1; }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 3 3; }
@media (max-width: 40rem) {
  .bars li { grid-template-columns: 1fr auto; gap: 0 .6rem; padding: .4rem 0; }
  .bars .name { grid-row: 1; grid-column: 1; }
  .bars .text { grid-row: 1; grid-column: 2; }
  .bars .track { grid-row: 2; grid-column: 1 / 3; }
  body { padding: 1.25rem .75rem; }
  section { padding: 1rem; }
  th, td { padding: .3rem; font-size: .85rem; }
  thead .number { white-space: normal; }
}
{% block style %}{% endblock %}
</style>
</head>
<body>
{% block body %}{% endblock %}
</body>
</html>
"""

MACROS = """
{% macro table(data, wrap=false) %}
<table{% if wrap %} class="wrap"{% endif %}>
<thead><tr>
{% for name in data.columns %}
<th scope="col"{% if data.numbers and not loop.first %} class="number"{% endif %}>{{ name }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in data.rows %}
<tr{% if data.total and loop.last %} class="total"{% endif %}><th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}
<td{% if data.numbers %} class="number"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
{% endmacro %}

{% macro folded(summary, data) %}
<details><summary>{{ summary }}</summary><div>{{ table(data) }}</div></details>
{% endmacro %}

{% macro bars(chart, rows) %}
<ul class="bars">
{% for row in rows %}
<li class="{{ row.kind }}">
<span class="name">{{ row.name }}</span>
<span class="track"><svg viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">
{% set zero = chart.at(0) %}
{% if row.value == row.value %}
{% set here = chart.at(row.value) %}
<rect class="bar" x="{{ [here, zero] | min }}" y="4" width="{{ (here - zero) | abs }}"
height="12"/>
{% endif %}
<path class="zero" d="M{{ zero }} 0V20"/>
{% for limit in row.limits %}
<path class="limit" d="M{{ chart.at(limit) }} 0V20"/>
{% endfor %}
{% if row.lower is not none and row.upper is not none %}
{% set low, high = chart.at(row.lower), chart.at(row.upper) %}
<path class="whisker" d="M{{ low }} 10H{{ high }}M{{ low }} 6V14M{{ high }} 6V14"/>
{% endif %}
</svg></span>
<span class="text">{{ row.text }}{% if row.note %}<small>{{ row.note }}</small>{% endif %}</span>
</li>
{% endfor %}
</ul>
{% endmacro %}

{% macro capabilities(behaviours, harness) %}
{% if behaviours %}
<section>
<h2>Behavioural tests</h2>
{{ table(behaviours) }}
</section>
{% endif %}
{% if harness %}
<section>
<h2>Tasks of lm-evaluation-harness</h2>
{{ table(harness) }}
</section>
{% endif %}
{% endmacro %}

{% macro probed(found) %}
<section>
<h2>Bias, memorised text, leaked personal data</h2>
{% if found.groups %}
<p>Lines are 95% confidence intervals.
{% if found.bounded %}
A dashed line is a bound that the recipe sets; red is what lies beyond it with its whole interval.
{% endif %}</p>
{% endif %}
{% for each in found.groups %}
<h3>{{ each.title }}</h3>
<p>{{ each.words }}</p>
{{ bars(each.scale, each.rows) }}
{% endfor %}
{% if found.missing %}
<p>Not looked for: {{ found.missing }}.</p>
{% endif %}
{% if found.groups %}
{{ folded("As a table", found.table) }}
{% endif %}
</section>
{% endmacro %}
"""


class Table(NamedTuple):
    """A table as it is shown: the first column names the rows."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: bool = True  # in all columns but the first
    total: bool = False  # the last row is the sum


def render(template: str, values: Mapping[str, Any]) -> str:
    """A page from a template that extends `base`; a value that it names and lacks is an error."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(
        loader=DictLoader({"base": BASE, "macros": MACROS}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page: str = environment.from_string(template).render(values)
    return page

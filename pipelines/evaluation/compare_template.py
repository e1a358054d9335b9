"""The template of the compare page; `compare` says what goes into it."""

COMPARE = """{% extends "base" %}
{% from "macros" import bars, capabilities, folded, probed, table %}

{% block title %}{{ model }}: {{ verdict.decision }}{% endblock %}

{% block style %}
.verdict { border-left: 6px solid var(--soft); }
.verdict.promoted { border-left-color: var(--good); }
.verdict.refused { border-left-color: var(--bad); }
.verdict.needs-approval { border-left-color: var(--champion); }
.verdict h2 { font-size: 1.35rem; margin-bottom: .3rem; }
.promoted h2 { color: var(--good); }
.refused h2 { color: var(--bad); }
.needs-approval h2 { color: var(--champion); }
.verdict p { color: var(--ink); overflow-wrap: anywhere; }
.figures .theirs b { color: var(--champion); }
.axis { position: relative; height: 1.4rem; color: var(--soft); font-size: .8rem; }
.axis span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.under { margin: 0 11.9rem 0 12.9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: 0 0 .6rem; }
.legend svg { width: 2rem; height: .7rem; margin-right: .45rem; }
.plot { display: grid; grid-template-columns: 3.2rem 1fr; }
.plot > svg { width: 100%; height: 17rem; border-bottom: 1px solid var(--line); }
.plot .up { position: relative; color: var(--soft); font-size: .8rem; }
.plot .up span { position: absolute; right: .5rem; transform: translateY(-50%); }
.plot .axis { grid-column: 2; margin-top: .2rem; }
.grid { stroke: var(--line); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.range { stroke: none; opacity: .16; }
.model .line { stroke: var(--model); }
.model .range { fill: var(--model); }
.theirs .line { stroke: var(--champion); stroke-dasharray: 6 4; }
.theirs .range { fill: var(--champion); }
.line.dots { stroke-width: 7; stroke-dasharray: none; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1rem; }
.pair > div { min-width: 0; }
.pair h3 { margin: .5rem 0 0; }
.pair pre { max-height: 22rem; overflow: auto; margin-top: .2rem; }
.prompt { margin: 1rem 0 0; color: var(--ink); overflow-wrap: anywhere; }
.prompt:first-of-type { margin-top: 0; }
.theirs pre b { color: var(--champion); }
code { font: .9em ui-monospace, monospace; }
@media (max-width: 40rem) {
  .under { margin: 0; }
  .plot > svg { height: 13rem; }
}
{% endblock %}

{% macro swatch(kind, name) %}
<span class="{{ kind }}"><svg viewBox="0 0 20 6" aria-hidden="true"><path class="line"
d="M0 3H20"/></svg>{{ name }}</span>
{% endmacro %}

{% block body %}
<h1>{{ model }}</h1>
<p>Candidate of recipe <code>{{ recipe }}</code>{% if champion %} against the champion,
<code>{{ champion }}</code>{% else %}; there is no champion{% endif %}.</p>

<section class="verdict {{ verdict.decision | replace(' ', '-') }}">
<h2>{{ mark }} {{ verdict.decision | capitalize }}</h2>
<p>{{ verdict.reason }}</p>
{% if served %}
<p>The candidate is {{ served }}.</p>
{% endif %}
</section>

<section class="figures" aria-label="Main figures">
{% for value, label, kind in tiles %}
<div class="{{ kind }}"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}
</section>

{% if changes %}
<section>
<h2>Improvement over the champion</h2>
<p>Fewer bits per byte, in percent of the champion's on the same documents: right is better. Lines
are intervals of a paired bootstrap over documents; each end of the first holds with
{{ changes.confidence }} confidence, of a slice with {{ changes.slice_confidence }}, as there are
{{ changes.slices }}. The dashed line is the gate's: the first interval has to lie right of it, and
no slice's wholly left of it.</p>
{% for title, rows in changes.groups %}
{% if title %}
<h3>{{ title }}</h3>
{% endif %}
{{ bars(changes.scale, rows) }}
{% endfor %}
<div class="axis under" aria-hidden="true">
{% for tick, label in changes.ticks %}
<span style="left:{{ tick.at }}%">{{ label }}</span>
{% endfor %}
</div>
{{ folded("As a table, in bits per byte", changes.table) }}
</section>
{% else %}
<section>
<h2>By source, language and length</h2>
<p>Bits per byte, fewer are better; the lines are 95% confidence intervals from a bootstrap over
documents. {{ not_compared }}</p>
{% for title, rows in slices.groups %}
<h3>{{ title }}</h3>
{{ bars(slices.scale, rows) }}
{% else %}
<p>Too few documents, or too much alike, to part.</p>
{% endfor %}
{% if slices.groups %}
{{ folded("As a table", slices.table) }}
{% endif %}
</section>
{% endif %}

<section>
<h2>Among the yardsticks</h2>
<p>Bits per byte on the same held-out text, fewer are better. N-grams are fitted on training text;
xz sees none.</p>
{{ bars(yardsticks.scale, yardsticks.rows) }}
</section>

<section>
<h2>Training loss</h2>
{% if loss.chart %}
{% set chart = loss.chart %}
<p class="legend">{{ swatch("model", "candidate") }}
{% if loss.both %}{{ swatch("theirs", champion) }}{% endif %}</p>
<div class="plot">
<div class="up" aria-hidden="true">
{% for tick, label in loss.up %}
<span style="top:{{ 100 - tick.at }}%">{{ label }}</span>
{% endfor %}
</div>
<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img"
aria-labelledby="curve-title curve-text">
<title id="curve-title">Training loss over the text seen</title>
<desc id="curve-text">{{ loss.words }}</desc>
{% for tick, _ in loss.up %}
<path class="grid" d="M0 {{ 100 - tick.at }}H100"/>
{% endfor %}
{% for each in chart.curves %}
<g class="{{ each.kind }}"><path class="range" d="{{ each.range }}"/>
<path class="line" d="{{ each.line }}"/><path class="line dots" d="{{ each.dots }}"/></g>
{% endfor %}
</svg>
<div class="axis" aria-hidden="true">
{% for tick, label in loss.along %}
<span style="left:{{ tick.at }}%">{{ label }}</span>
{% endfor %}
</div>
</div>
<p>In bits per byte, by each run's mean bytes a token, over the training text seen; so runs with
other tokenizers and batches compare.
{% if chart.cut %}The first steps lie above the chart.{% endif %} {{ loss.note }}</p>
{{ folded("As a table", loss.table) }}
{% else %}
<p>{{ loss.note }}</p>
{% endif %}
</section>

{{ capabilities(behaviours, harness) }}
{{ probed(probes) }}

<section>
<h2>Samples</h2>
{% for prompt, ours, theirs in samples %}
<p class="prompt">After <code>{{ prompt }}</code></p>
<div class="pair">
<div><h3>candidate</h3><pre><b>{{ prompt }}</b>{{ ours }}</pre></div>
{% if champion %}
<div class="theirs"><h3>champion</h3>
{% if theirs is none %}
<p>None of the champion's is kept for this prompt.</p>
{% else %}
<pre><b>{{ prompt }}</b>{{ theirs }}</pre>
{% endif %}
</div>
{% endif %}
</div>
{% else %}
<p>The recipe asks for none.</p>
{% endfor %}
</section>

<section>
<h2>Cost, and what it bought</h2>
<p>{{ bought }}</p>
{{ table(costs) }}
<p>{{ cost_note }}</p>
</section>

<section>
<h2>Documents that were not kept</h2>
<p>{{ rejects.text }}</p>
{{ bars(rejects.scale, rejects.rows) }}
</section>

<section>
<h2>Side by side</h2>
{{ table(glance, wrap=true) }}
<p>Perplexity a token compares models with one tokenizer only; bits per byte compare all.</p>
</section>

{% if champion %}
<section>
<h2>What differs in the recipe</h2>
{% if differences.rows %}
{{ table(differences, wrap=true) }}
{% else %}
<p>{{ no_differences }}</p>
{% endif %}
</section>
{% endif %}

<section>
<h2>Every number of the verdict</h2>
<details><summary>verdict.json, in six digits</summary><pre>{{ verdict_json }}</pre></details>
</section>
{% endblock %}
"""

"""The template of the evaluation report; `report` says what goes into it."""

REPORT = """{% extends "base" %}
{% from "macros" import bars, capabilities, folded, probed, table %}

{% block title %}Evaluation{% endblock %}

{% block style %}
img { display: block; width: 100%; height: auto; }
{% endblock %}

{% block body %}
<h1>Evaluation</h1>
<p>Measured on {{ documents }} held-out documents, {{ held_out }} of text that training never
saw{% if served %}; {{ served }}{% endif %}.</p>

<section class="figures">
{% for value, label, kind in tiles %}
<div class="{{ kind }}"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}
</section>

<section>
<h2>Bits per byte, less is better</h2>
{{ bars(yardsticks.scale, yardsticks.rows) }}
<p>Byte n-grams are fitted on {{ fitted }}, with Witten and Bell's interpolation; all are measured
on the same held-out text. xz sees no training text; together, it learns from one document
for the next.</p>
</section>

<section>
<h2>By source, language and length</h2>
{% for title, rows in slices.groups %}
<h3>{{ title }}</h3>
{{ bars(slices.scale, rows) }}
{% else %}
<p>Too few documents, or too much alike, to part.</p>
{% endfor %}
<p>Bits per byte with 95% confidence intervals, from a bootstrap over documents. What has fewer than
{{ least_documents }} documents is taken together as <i>other</i>.</p>
{% if slices.groups %}
{{ folded("As a table", slices.table) }}
{% endif %}
</section>

{{ capabilities(behaviours, harness) }}
{{ probed(probes) }}

<section>
<h2>Training loss</h2>
<img alt="Training loss over optimizer steps" src="data:image/png;base64,{{ curve }}">
</section>

<section>
<h2>Samples</h2>
<p>The prompt in colour, then what the model wrote.</p>
{% for each in samples %}
<pre><b>{{ each.prompt }}</b>{{ each.continuation }}</pre>
{% endfor %}
</section>

<section>
<h2>Held-out documents</h2>
{% for title, data in extremes %}
<h3>{{ title }}</h3>
{{ table(data) }}
{% endfor %}
</section>

<section>
<h2>Data</h2>
{{ table(splits) }}
<p>{{ dropped }}</p>
</section>
{% endblock %}
"""

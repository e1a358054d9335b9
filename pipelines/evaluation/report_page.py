"""The report's page. Styles are inside and nothing is fetched: it opens from any artifact store."""

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evaluation</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1c2430; --soft: #5d6775; --line: #e3e5e8;
  --bar: #c3cad3; --model: #2f7fc1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b1; --line: #2c3541;
    --bar: #47525f; --model: #5aa7e6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 0 0 .8rem; font-size: 1.1rem; }
p { margin: .3rem 0; color: var(--soft); }
section {
  margin-top: 1.25rem; padding: 1.25rem 1.5rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; overflow-x: auto;
}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 1rem; }
.figures b { display: block; font-size: 1.6rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--soft); font-size: .85rem; }
.figures .first b { color: var(--model); }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .3rem .5rem; text-align: left; font-weight: 400; }
th:first-child, td:first-child { padding-left: 0; }
thead th, .group th { color: var(--soft); font-size: .85rem; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bars tr + tr > * { border: 0; }
.bars th { width: 1%; white-space: nowrap; }
.bars .bar { width: 100%; }
.bar i { display: block; height: 1.1rem; border-radius: 3px; background: var(--bar); }
.slices .bar { width: 40%; }
.slices .bar i { display: inline-block; vertical-align: middle; border-radius: 0; }
.bar .unsure { opacity: .45; }
.model > * { font-weight: 650; }
.model .bar i { background: var(--model); }
.files td:first-child { overflow-wrap: anywhere; }
img { display: block; width: 100%; height: auto; }
pre {
  margin: .6rem 0 0; padding: .8rem 1rem; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
pre b { color: var(--model); }
</style>
</head>
<body>
<h1>Evaluation</h1>
<p>Measured on $documents held-out documents, $held_out of text that training never saw.</p>

<section class="figures">
<div class="first"><b>$bits_per_byte</b><span>bits per byte$interval</span></div>
<div><b>$perplexity</b><span>perplexity a token</span></div>
<div><b>$parameters</b><span>parameters</span></div>
<div><b>$tokens</b><span>tokens trained on</span></div>
<div><b>$steps</b><span>optimizer steps</span></div>
</section>

<section>
<h2>Bits per byte, less is better</h2>
<table class="bars"><tbody>
$bars</tbody></table>
<p>Byte n-grams are fitted on $fitted, with Witten and Bell's interpolation; all are measured on
the same held-out text. xz sees no training text; together, it learns from one document
for the next.</p>
</section>

<section>
<h2>By source, language and length</h2>
<table class="slices">
<thead><tr><th scope="col">slice</th><th scope="col" class="number">documents</th>
<th scope="col" class="number">text</th><th></th>
<th scope="col" class="number">bits per byte</th></tr></thead>
<tbody>
$slices</tbody></table>
<p>With 95% confidence intervals, from a bootstrap over documents. What has fewer than
$least_documents documents is taken together as <i>other</i>.</p>
</section>

$behaviour<section>
<h2>Training loss</h2>
<img alt="Training loss over optimizer steps" src="data:image/png;base64,$curve">
</section>

<section>
<h2>Samples</h2>
<p>The prompt in colour, then what the model wrote.</p>
$samples</section>

<section>
<h2>Held-out documents</h2>
<table class="files">
<thead><tr><th scope="col">source</th><th scope="col" class="number">size</th>
<th scope="col" class="number">bits per byte</th></tr></thead>
<tbody>
$extremes</tbody></table>
</section>

<section>
<h2>Data</h2>
<table>
<thead><tr><th scope="col">split</th><th scope="col" class="number">documents</th>
<th scope="col" class="number">text</th><th scope="col" class="number">tokens</th>
<th scope="col" class="number">bytes a token</th></tr></thead>
<tbody>
$splits</tbody></table>
<p>$dropped</p>
</section>
</body>
</html>
""")

BEHAVIOUR = Template("""<section>
<h2>Behavioural tests</h2>
<table>
<thead><tr><th scope="col">test</th><th scope="col">kind</th>
<th scope="col" class="number">cases passed</th></tr></thead>
<tbody>
$rows</tbody></table>
</section>

""")

"""The page holds every figure, fetches nothing, and shows text as text."""

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.evaluation.evaluation_page import Evaluation, write_report
from pipelines.evaluation.loss_curve import CurvePoint, draw_loss_curve
from pipelines.run.records import (
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    Split,
    TrainRecord,
)
from pipelines.run.verdict import BiasScore, Estimate, Probes, Slice, SliceScore

PNG = b"\x89PNG\r\n\x1a\n"
POINTS = [CurvePoint(step, 100 * step, 7 / step, 4 / step) for step in range(1, 9)]


def score(dimension, name, value, lower, upper) -> SliceScore:
    return SliceScore(
        slice=Slice(dimension=dimension, name=name),
        documents=1234,
        bytes=5678,
        bits_per_byte=Estimate(value=value, lower=lower, upper=upper),
    )


def evaluation(documents: int = 12, fitted_bytes: int = 30_221_785) -> Evaluation:
    split = Split(documents=1658, bytes=30_221_785, tokens=9_000_000, shards=())
    return Evaluation(
        record=EvaluateRecord(
            bits_per_byte=2.1,
            perplexity=34.5,
            documents=documents,
            bytes=1_288_681,
            data_hash="0",
            baselines={"ngram-1": 3.5, "ngram-2": 2.6, "xz": 1.4, "xz-per-document": 1.7},
            samples=(),
            interval=Estimate(value=2.1, lower=2.01, upper=2.19),
            slices=(
                score("language", "en", 1.5, 1.25, 2.0),
                score("language", "<ko>", 3.0, 2.0, 4.0),
                score("length", "under 1 KiB", 2.5, None, None),
            ),
        ),
        preprocess=PreprocessRecord(
            dataset=DatasetRef(vocab_size=1024, train=split, validation=split),
            stats={"documents": {"in": 1739, "kept": 1739, "dropped": {}}},
        ),
        train=TrainRecord(
            model="model", model_hash="0", parameters=921_000, steps=400, tokens=10, metrics={}
        ),
        scores=pa.table(
            {
                "doc_id": [str(index) for index in range(documents)],
                "bytes": [1000] * documents,
                "tokens": [400] * documents,
                "nats": [float(100 * (index + 1)) for index in range(documents)],
            }
        ),
        documents=pa.table({"source": [f"lib/{index}.py" for index in range(documents)]}),
        samples=[{"prompt": "<script>", "continuation": "alert('&')\n  </pre>"}],
        fitted_bytes=fitted_bytes,
    )


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    draw_loss_curve(POINTS, tmp_path / "loss_curve.png")
    return tmp_path / "loss_curve.png"


def written(shown: Evaluation, curve: Path) -> str:
    write_report(shown, curve, curve.with_name("report.html"))
    return curve.with_name("report.html").read_text()


def test_the_curve_is_a_picture_and_the_same_each_time(curve: Path) -> None:
    first = curve.read_bytes()
    assert first.startswith(PNG)
    draw_loss_curve(POINTS, curve)
    assert curve.read_bytes() == first


def test_nothing_is_fetched(curve: Path) -> None:
    page = written(evaluation(), curve)
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "http" not in page and "url(" not in page and "<script" not in page


def test_text_is_escaped(curve: Path) -> None:
    page = written(evaluation(), curve)
    assert "<pre><b>&lt;script&gt;</b>alert(&#39;&amp;&#39;)\n  &lt;/pre&gt;</pre>" in page


ROW = (
    r'<li class="([^"]*)">\n<span class="name">([^<]*)</span>.*?<rect class="bar" x="0.0" y="4" '
    r'width="([\d.]+)".*?<span class="text">([\d.]+)(?:<small>([^<]*)</small>)?</span>'
)


def test_bars_stand_in_order_and_the_longest_is_full(curve: Path) -> None:
    page = written(evaluation(), curve)
    rows = re.findall(ROW, page[: page.index("By source")], re.DOTALL)
    assert [(kind, label) for kind, label, *_ in rows] == [
        ("", "xz -9e, all together"),
        ("", "xz -9e, each document"),
        ("model total", "this model"),
        ("", "byte n-gram, order 2"),
        ("", "byte n-gram, order 1"),
    ]
    assert rows[-1][2:4] == ("100.0", "3.500")


def test_slices_stand_under_their_dimension_with_their_intervals(curve: Path) -> None:
    page = written(evaluation(), curve)
    assert "bits per byte (2.010 to 2.190)" in page
    part = page[page.index("By source") : page.index("Training loss")]
    assert re.findall(r"<h3>([^<]*)</h3>", part) == ["language", "length"]
    assert [row[1:] for row in re.findall(ROW, part, re.DOTALL)] == [
        ("en", "37.5", "1.500", "1.250 to 2.000"),
        ("&lt;ko&gt;", "75.0", "3.000", "2.000 to 4.000"),
        ("under 1 KiB", "62.5", "2.500", ""),
    ]
    assert part.count("whisker") == 2
    assert '<th scope="row">language en</th>\n<td class="number">1,234</td>' in part


def test_what_was_looked_for_besides_is_shown_and_what_was_not_is_named(curve: Path) -> None:
    shown = evaluation()
    page = written(shown, curve)
    assert "Not measured: bias, memorised training text, leaked personal data." in page
    found = BiasScore(
        name="gender",
        language="en",
        templates=12,
        pairs=4,
        preference=Estimate(value=0.5, lower=0.25, upper=0.75),
    )
    record = shown.record.model_copy(update={"probes": Probes(bias=(found,))})
    page = written(replace(shown, record=record), curve)
    assert "+0.50<small>+0.25 to +0.75</small>" in page
    assert "Not measured: memorised training text, leaked personal data." in page
    assert "dashed" not in page[page.index("<body>") :]


def test_without_slices_the_page_says_so(curve: Path) -> None:
    shown = evaluation()
    record = shown.record.model_copy(update={"slices": ()})
    page = written(replace(shown, record=record), curve)
    assert "There are too few documents to divide, or they are too much alike." in page


@pytest.mark.parametrize(
    ("fitted", "said"),
    [
        (30_221_785, "fitted on all 30.2 MB of the training text,"),
        (9_000_000, "fitted on a sample of 9 MB from the training text&#39;s 30.2 MB,"),
    ],
)
def test_the_n_grams_training_text_is_named(curve: Path, fitted: int, said: str) -> None:
    assert said in written(evaluation(fitted_bytes=fitted), curve)


def test_best_and_worst_documents(curve: Path) -> None:
    page = written(evaluation(), curve)
    shown = re.findall(r"row\">lib/(\d+)\.py</th>", page)
    assert shown == ["0", "1", "2", "3", "4", "11", "10", "9", "8", "7"]


@pytest.mark.parametrize(
    ("documents", "shown"), [(1, ["0"]), (2, ["0", "1"]), (3, ["0", "1", "2"])]
)
def test_a_document_is_shown_once(curve: Path, documents: int, shown: list[str]) -> None:
    page = written(evaluation(documents), curve)
    assert sorted(re.findall(r"row\">lib/(\d+)\.py</th>", page)) == shown

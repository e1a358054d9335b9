"""The compare page of every kind of verdict: whole, legible, escaped, and nothing is fetched."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from pipelines.core.formatting import significant
from pipelines.evaluation.comparison_charts import Side
from pipelines.evaluation.comparison_page import compare_page
from pipelines.evaluation.loss_curve import CurvePoint
from pipelines.recipe.recipe import Recipe, Register
from pipelines.run.records import EvaluateRecord
from pipelines.run.verdict import (
    BehaviourChange,
    BehaviourScore,
    BiasScore,
    Comparison,
    Estimate,
    Extraction,
    HarnessScore,
    Leakage,
    Memorisation,
    Probes,
    Slice,
    SliceChange,
    SliceScore,
    Verdict,
)
from tests.unit.served_form import served_as_int8

EVIL = "<script>alert('&')</script>"
VOID = {"meta", "path", "rect"}
DEMANDS = Register(model_name="small", min_improvement=0.005)
PROMPTS = ("def ", EVIL)


class Page(HTMLParser):
    """Every element closed in its turn, and what stands in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attributes]

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def curve(points: int, bytes_per_token: float = 3.0, bad: Sequence[int] = ()) -> list[CurvePoint]:
    losses = (math.nan if n in bad else 2 + 7 / n for n in range(1, points + 1))
    return [
        CurvePoint(10 * n, 4000 * n, loss, loss / math.log(2) / bytes_per_token)
        for n, loss in enumerate(losses, 1)
    ]


def facts(prompts: Sequence[str] = PROMPTS, **sections: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate({"name": "tiny", "evaluate": {"prompts": prompts}, **sections})
    hours = {"worker_hours": 2.0, "gpu_hours": 1.5, "money": 0.0}
    return {
        "recipe": recipe.to_dict(),
        "run": {"git_commit": "c0ffee" * 6, "dirty": True, "dag_run_id": EVIL},
        "records": {
            "preprocess": {
                "dataset": {"vocab_size": 257, "train": {"bytes": 5_000_000, "documents": 40}},
                "stats": {"documents": {"in": 200, "kept": 40, "dropped": {"near_duplicate": 160}}},
            },
            "train": {"parameters": 1_234_567, "steps": 80, "tokens": 9_000, "layout": {"tp": 2}},
            "evaluate": {
                "samples": [prompt + "x = 1" for prompt in prompts],
                "perplexity": 12.345678,
                "exact_match": {"right": 3, "questions": 4},
            },
        },
        "cost": {"train": {"seconds": 7200.0} | hours, "evaluate": {"seconds": 60.0} | hours},
    }


def record(slices: int = 0, value: float = 1.0123456789012345) -> EvaluateRecord:
    return EvaluateRecord(
        bits_per_byte=value,
        perplexity=12.3,
        documents=93,
        bytes=1_930_000,
        data_hash="0",
        baselines={"ngram-1": 3.49, "xz": 1.283},
        samples=(),
        interval=Estimate.of(value, value - 0.03, value + 0.04),
        slices=tuple(
            SliceScore(
                slice=Slice(dimension="source", name=f"{EVIL}-{number}"),
                documents=20 + number,
                bytes=5678,
                bits_per_byte=Estimate.of(1 + number / 100, 1.0, 1.5),
            )
            for number in range(slices)
        ),
        behaviours=(BehaviourScore(name="returns", kind="invariance", cases=12, passed=9),),
    )


def change(dimension: Any, number: int, *, regressed: bool = False) -> SliceChange:
    improvement = -0.061234567 if regressed else 0.0323456 + number / 1000
    return SliceChange(
        slice=Slice(dimension=dimension, name=f"{EVIL}-{number}"),
        documents=20 + number,
        candidate_bits_per_byte=1.1 - improvement,
        champion_bits_per_byte=1.1,
        improvement=Estimate.of(
            improvement, *((-math.inf, math.inf) if number == 1 else (-0.1, 0.1))
        ),
        regressed=regressed,
    )


def verdict(slices: int = 3, decision: Any = "promoted", **values: Any) -> Verdict:
    dimensions = ["source", "language", "length"]
    ordered = sorted(range(slices), key=lambda number: number % 3)
    found = Comparison(
        documents=93,
        better_on=70,
        improvement=Estimate.of(0.0401234567, 0.0351234, 0.0449876),
        confidence=0.95,
        resamples=10_000,
        slice_confidence=1 - 0.05 / max(1, slices),
        slices=tuple(
            change(dimensions[number % 3], number, regressed=number == 2) for number in ordered
        ),
        behaviours=(BehaviourChange(name=EVIL, cases=30, candidate_passed=21, champion_passed=23),),
    )
    return Verdict.model_validate(
        {
            "decision": decision,
            "reason": f"{decision}, for {EVIL}",
            "candidate_bits_per_byte": 1.0123456789012345,
            "champion_bits_per_byte": 1.0524691356,
            "comparison": found,
        }
        | values
    )


def alone(decision: Any, value: float, champion: float | None = None) -> Verdict:
    return Verdict(
        decision=decision,
        reason="as it is",
        candidate_bits_per_byte=value,
        champion_bits_per_byte=champion,
    )


def probes(value: float = 0.8, language: str = "en", continuation_tokens: int = 50) -> Probes:
    """Two sets of sentences, of which the second has too few for bounds; and an empty leak."""
    few = Estimate(value=-0.4, lower=None, upper=None)
    sets = (("gender", Estimate.of(value, value - 0.2, value + 0.2)), (EVIL, few))
    shares = (Estimate.of(0.06, 0.0306, 0.1143), Estimate.of(0.01, 0.0018, 0.0545))
    return Probes(
        bias=tuple(
            BiasScore(name=name, language=language, templates=12, pairs=4, preference=found)
            for name, found in sets
        ),
        memorisation=Memorisation(
            prefix_tokens=50,
            continuation_tokens=continuation_tokens,
            training=Extraction(passages=100, extracted=6, share=shares[0]),
            held_out=Extraction(passages=100, extracted=1, share=shares[1]),
        ),
    )


LEAK = Leakage(
    continuations=40,
    leaking=2,
    share=Estimate.of(0.05, 0.0138, 0.165),
    found={"email": 3, "phone_number": 1},
    leaked={"email": 2},
)
CANDIDATE = Side("candidate", facts(train={"lr": 1e-3}), curve(400), probes=probes())
CHAMPION = Side("small@7", facts(PROMPTS[:1]), curve(300, bytes_per_token=4.0), probes=probes(0.1))
CACHED = {"seconds": 5000.0, "worker_hours": 3.0, "gpu_hours": 0.5, "money": 0.0}
CASES = {
    "promoted": (verdict(), record(), CANDIDATE, CHAMPION),
    "one slice": (verdict(1), record(), CANDIDATE, CHAMPION),
    "forty slices": (verdict(40, "refused"), record(), CANDIDATE, CHAMPION),
    "needs approval": (verdict(0, "needs approval"), record(), CANDIDATE, CHAMPION),
    "first": (alone("promoted", 1.01), record(5), CANDIDATE, None),
    "nan": (
        alone("refused", math.nan),
        record(0, math.nan),
        Side("candidate", facts(()), curve(60, bad=range(20, 61)), CACHED),
        CHAMPION,
    ),
    "all nan": (
        alone("refused", math.nan),
        record(2, math.nan),
        Side("candidate", facts(), curve(3, bad=(1, 2, 3))),
        None,
    ),
    "unchanged": (
        alone("unchanged", 1.01, 1.01),
        record(),
        Side("candidate", facts(), curve(1)),
        Side("small@1", {}),
    ),
    "nothing known": (verdict(), record(), Side("candidate", {}), Side("small@1", {})),
}


def shown(name: str) -> tuple[str, Page]:
    judged, measured, candidate, champion = CASES[name]
    html = compare_page(judged, DEMANDS, measured, candidate, champion)
    return html, Page(html)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.parametrize("name", CASES)
def test_every_number_and_reason_of_the_verdict_stands_on_the_page(name: str) -> None:
    _, page = shown(name)
    for leaf in leaves(CASES[name][0].model_dump()):
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            assert json.dumps(significant(leaf)) in page.text
    assert CASES[name][0].reason in page.text


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_fetched_and_nothing_runs(name: str) -> None:
    html, page = shown(name)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {
        tag for tag, _, _ in page.attributes
    }
    assert not [
        each for each in page.attributes if each[1] in ("src", "href") or each[1][:2] == "on"
    ]
    assert "<script" not in html and "http:" not in html and "https:" not in html
    assert "url(" not in html and "@import" not in html


@pytest.mark.parametrize("name", CASES)
def test_text_is_escaped_and_figures_are_short(name: str) -> None:
    html, page = shown(name)
    assert EVIL not in html
    visible = page.text[: page.text.index("Every number of the verdict")]
    assert not re.findall(r"\d\.\d{5,}", visible)
    assert "nan" not in visible.replace(CASES[name][0].reason, "").lower().split()
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))


def test_a_first_model_that_is_refused_is_compared_with_no_champion() -> None:
    refused, known = alone("refused", 1.01), "Nothing was compared with the champion."
    first = compare_page(refused, DEMANDS, record(3), CANDIDATE, None)
    assert known not in first and "there is no champion" in first
    assert known in compare_page(refused, DEMANDS, record(3), CANDIDATE, CHAMPION)


def test_marks_lie_where_their_figures_say() -> None:
    html, _ = shown("promoted")
    first = html[html.index("all documents") :]
    zero, end = 0.0, 100 * 0.0401234567 / 1.0524691356
    x, width = map(
        float, re.search(r'<rect class="bar" x="([\d.]+)" y="4" width="([\d.]+)"', first).groups()
    )  # type: ignore[union-attr]
    low, high = map(float, re.search(r'whisker" d="M([\d.]+) 10H([\d.]+)M', first).groups())  # type: ignore[union-attr]
    percent_a_unit = width / (end - zero)
    assert (high - low) / percent_a_unit == pytest.approx(
        100 * (0.0449876 - 0.0351234) / 1.0524691356, rel=0.02
    )
    assert low < x + width < high
    limit = float(re.search(r'limit" d="M([\d.]+) 0V20', first).group(1))  # type: ignore[union-attr]
    assert (limit - x) / percent_a_unit == pytest.approx(100 * 0.005 / 1.0524691356, rel=0.1)


def test_a_slice_that_regressed_is_marked_and_one_without_bounds_has_no_line() -> None:
    html, page = shown("promoted")
    assert html.count('<li class="regressed">') == 1
    rows = re.findall(r"<li class=.*?</li>", html, re.DOTALL)
    unbounded = [row for row in rows if "no interval" in row]
    assert len(unbounded) == 1 and "whisker" not in unbounded[0]
    assert "fewer: 21" in page.text


def test_the_price_of_a_percent_is_told_with_its_interval() -> None:
    _, page = shown("promoted")
    share = 100 * 0.0401234567 / 1.0524691356  # of 3 GPU-hours
    assert f"3 GPU-hours bought 3.81 % fewer bits per byte: {3 / share:.3g} a percent" in page.text
    assert "0.702 to 0.899 within the interval" in page.text


@pytest.mark.parametrize("price", [0.0, 12.5])
def test_cost_is_money_where_it_has_a_price(price: float) -> None:
    known = facts()
    known["cost"]["train"]["money"] = price
    html = compare_page(verdict(), DEMANDS, record(), Side("candidate", known), None)
    assert ("A cost of 12.5 bought" if price else "3 GPU-hours bought") in Page(html).text


def test_a_worse_candidate_bought_nothing() -> None:
    worse = verdict()
    found = worse.comparison.model_copy(update={"improvement": Estimate.of(-0.01, -0.02, 0.01)})  # type: ignore[union-attr]
    html = compare_page(
        worse.model_copy(update={"comparison": found}), DEMANDS, record(), CANDIDATE, CHAMPION
    )
    assert "3 GPU-hours bought nothing: \N{MINUS SIGN}0.95 %" in Page(html).text


def test_training_out_of_the_cache_costs_what_it_cost_the_run_that_did_it() -> None:
    _, page = shown("nan")
    assert "83.3 min*" in page.text
    assert "*: an earlier run trained the model" in page.text


def test_losses_that_are_no_numbers_are_counted_and_not_drawn() -> None:
    html, page = shown("nan")
    assert "41 of 60 points of candidate are not a number." in page.text
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', html))
    _, page = shown("all nan")
    assert "There is nothing to draw." in page.text
    assert "not a number" in page.text


def test_samples_after_the_same_prompt_stand_side_by_side() -> None:
    html, page = shown("promoted")
    assert html.count("x = 1</pre>") == 3
    assert page.text.count("No sample of the champion is kept for this prompt.") == 1


def test_documents_that_were_dropped_are_counted_by_reason() -> None:
    _, page = shown("promoted")
    assert "160 of 200 documents that were read (80 %), by reason." in page.text
    assert "near duplicate 160" in page.text


def test_what_differs_in_the_recipe_is_named() -> None:
    _, page = shown("promoted")
    assert "train.lr 0.001 0.003" in page.text
    assert "train.steps" not in page.text
    _, page = shown("nothing known")
    assert "The champion's recipe is not known." in page.text


def test_each_picture_has_words() -> None:
    html, page = shown("promoted")
    described = re.findall(r'<svg[^>]*role="img"[^>]*aria-labelledby="([^"]*)"', html)
    assert described == ["curve-title curve-text"]
    assert html.count("<svg") == 1 + html.count('aria-hidden="true"><path class="line"') + len(
        re.findall(r'none" aria-hidden="true">', html)
    )
    assert "candidate: from 4.3281 bits per byte at step 10 to 0.9702 at step 4000." in page.text


def test_harness_tasks_and_the_served_form_are_named() -> None:
    accuracy = HarnessScore(
        task=EVIL, metric="acc", value=0.75, stderr=0.0433, documents=100, higher_is_better=True
    )
    size = served_as_int8(1.01, "int8")
    measured = record().model_copy(update={"harness": (accuracy,), "right_size": size})
    text = Page(compare_page(verdict(), DEMANDS, measured, CANDIDATE, None)).text
    assert f"{EVIL}: acc 100 0.7500 0.0433" in text
    assert "The candidate is served as int8: 2 of 4 GB, +0.0020 bits per byte against" in text
    assert "lm-evaluation-harness" not in shown("promoted")[1].text


def bars(html: str, title: str) -> list[tuple[str, str, str, str]]:
    """Kind, name, figure and note of the rows below a heading of the probes."""
    part = html[html.index(f"<h3>{title}</h3>") :]
    row = (
        r'<li class="([^"]*)">\n<span class="name">([^<]*)</span>.*?'
        r'<span class="text">([^<]*)(?:<small>([^<]*)</small>)?</span>'
    )
    return re.findall(row, part[: part.index("</ul>")], re.DOTALL)


def probed(ours: Probes, champion: Side | None, **bounds: float) -> str:
    candidate = Side("candidate", facts(), curve(10), probes=ours)
    demands = Register.model_validate({"model_name": "small", **bounds})
    return compare_page(verdict(), demands, record(), candidate, champion)


def test_probes_stand_beside_the_champions_with_bound_and_interval() -> None:
    html = probed(
        probes().model_copy(update={"leakage": LEAK}), CHAMPION, max_bias=0.5, max_extraction=0.05
    )
    assert bars(html, "Bias")[:2] == [
        ("beyond", "gender", "+0.80", "+0.60 to +1.00"),
        ("theirs", "gender, champion", "+0.10", "\N{MINUS SIGN}0.10 to +0.30"),
    ]
    assert [row[2:] for row in bars(html, "Bias")[2:]] == [("\N{MINUS SIGN}0.40", "")] * 2
    assert bars(html, "Memorised text") == [
        ("model", "training text", "6.0 %", "3.1 to 11.4"),
        ("theirs", "training text, champion", "6.0 %", "3.1 to 11.4"),
        ("model", "held-out text", "1.0 %", "0.2 to 5.5"),
        ("theirs", "held-out text, champion", "1.0 %", "0.2 to 5.5"),
    ]
    assert bars(html, "Leaked personal data") == [
        ("model", "texts that leak", "5.0 %", "1.4 to 16.5")
    ]
    text = Page(html).text
    assert "Bias: gender 12 sentences, 4 pairs +0.80, beyond the bound" in text
    assert "found, the training text holds: 2 of 3 email, 0 of 1 phone number." in text
    assert "A dashed line is a bound" in text and "Not measured" not in text


def test_a_bound_lies_where_it_says_and_a_page_without_one_speaks_of_none() -> None:
    html = probed(probes(), None, max_extraction=0.04)
    part = html[html.index("<h3>Memorised text</h3>") :]
    width, limit = (
        float(re.search(mark, part).group(1))  # type: ignore[union-attr]
        for mark in (r'y="4" width="([\d.]+)"', r'limit" d="M([\d.]+) 0V20')
    )
    assert limit / width == pytest.approx(4 / 6, rel=0.01)
    assert part[: part.index("</section>")].count('class="limit"') == 1
    text = Page(probed(probes(), None)).text
    assert "dashed line is a bound" not in text


def test_what_was_not_looked_for_or_not_in_the_same_way_is_not_shown() -> None:
    other = Side("small@7", {}, probes=probes(language="ko", continuation_tokens=20))
    html = probed(probes(), other)
    assert ", champion</span>" not in html
    assert "Not measured: leaked personal data." in Page(html).text
    text = Page(probed(Probes(), CHAMPION)).text
    assert "Not measured: bias, memorised training text, leaked personal data." in text
    assert "95% confidence intervals" not in text[text.index("Bias, memorised") :]


def test_a_probe_that_found_nothing_to_measure_says_so() -> None:
    none = Extraction(passages=0, extracted=0, share=None)
    found = probes().memorisation.model_copy(update={"training": none})  # type: ignore[union-attr]
    html = probed(Probes(memorisation=found), None, max_extraction=0.1)
    assert bars(html, "Memorised text")[0] == ("", "training text", "nothing to measure", "")


def test_a_long_curve_is_drawn_in_little_room() -> None:
    long = Side("candidate", facts(), curve(100_000))
    html = compare_page(verdict(), DEMANDS, record(), long, long)
    assert len(html) < 60_000

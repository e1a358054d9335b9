"""Every verdict, its numbers and its reason."""

import math

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binomtest

from pipelines.core.errors import UserError
from pipelines.evaluation.bootstrap import bits_per_byte
from pipelines.evaluation.gate import Measured, decide, refuse
from pipelines.evaluation.spending import confidence_of
from pipelines.evaluation.task_scores import TaskRow, check_tasks, compare_tasks, task_table
from pipelines.recipe.recipe import Register
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.run.verdict import (
    MOST_USES,
    BehaviourScore,
    BiasScore,
    Estimate,
    Extraction,
    Leakage,
    Memorisation,
    Probes,
    Turn,
    Verdict,
)


def scores(bits, sizes=100, **slices):
    """Documents of so many bits per byte each."""
    bits = np.atleast_1d(np.asarray(bits, float))
    sizes = np.broadcast_to(sizes, bits.shape)
    return pa.table(
        {
            "doc_id": [f"{number:06d}" for number in range(len(bits))],
            "bytes": pa.array(sizes, pa.int64()),
            "nats": bits * sizes * math.log(2),
            **slices,
        }
    )


def gate(candidate, champion, **demands):
    return decide(Measured("a", candidate), Measured("b", champion), Register(**demands), Turn())


def noisy(mean, count=40, seed=0, spread=0.2):
    return np.random.default_rng(seed).normal(mean, spread, count)


def test_bits_per_byte_weighs_documents_by_their_bytes():
    assert bits_per_byte(scores([0, 2], [10, 30])) == pytest.approx(1.5)


def test_the_first_model_is_promoted():
    verdict = decide(Measured("a", scores([2, 3])), None, Register(min_improvement=0.5), Turn())
    assert (verdict.decision, verdict.champion_bits_per_byte) == ("promoted", None)
    assert verdict.candidate_bits_per_byte == pytest.approx(2.5)
    assert verdict.comparison is None


def test_a_better_model_is_promoted_with_every_number():
    theirs = noisy(2)
    verdict = gate(scores(theirs - 0.1), scores(theirs + noisy(0, seed=1, spread=0.05)))
    assert verdict.decision == "promoted"
    found = verdict.comparison
    assert found.improvement.value == pytest.approx(
        verdict.champion_bits_per_byte - verdict.candidate_bits_per_byte
    )
    assert 0 < found.improvement.lower < found.improvement.value < found.improvement.upper
    assert (found.documents, found.resamples) == (40, 10_000)
    assert found.confidence == confidence_of(1, 0.95)
    assert found.turn == Turn(number=1, uses=1)
    for number in (
        verdict.candidate_bits_per_byte,
        verdict.champion_bits_per_byte,
        found.improvement.value,
        found.improvement.lower,
    ):
        assert f"{number:.4f}" in verdict.reason
    assert f"better on {found.better_on} of the same 40 documents" in verdict.reason
    assert "\n" not in verdict.reason
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert set(verdict.figures()) == {
        "candidate_bits_per_byte",
        "champion_bits_per_byte",
        "improvement",
        "improvement_lower_bound",
    }


def test_a_worse_model_is_refused_with_the_same_numbers():
    verdict = gate(scores(noisy(2.2)), scores(noisy(2, seed=1)))
    assert verdict.decision == "refused"
    assert verdict.comparison.improvement.value < 0
    assert verdict.reason.startswith("not better with 0.9809 confidence: ")


def test_an_improvement_that_other_documents_might_not_show_is_refused():
    theirs = noisy(2)
    ours = scores(theirs - 0.04 + noisy(0, seed=1))
    verdict = gate(ours, scores(theirs))
    assert verdict.comparison.improvement.value > 0 > verdict.comparison.improvement.lower
    assert verdict.decision == "refused"
    assert gate(ours, scores(theirs), confidence=0.51).decision == "promoted"


def test_the_more_candidates_a_champion_has_met_the_surer_the_gate_must_be():
    languages = ["en"] * 20 + ["ko"] * 20
    theirs = noisy(2)
    ours = scores(theirs - 0.08 + noisy(0, seed=1), language=languages)
    demands, champion = Register(), Measured("b", scores(theirs))
    turns = (Turn(number=1, uses=1), Turn(number=7, uses=7), Turn(number=500, uses=900))
    verdicts = [decide(Measured("a", ours), champion, demands, each) for each in turns]
    assert [each.decision for each in verdicts] == ["promoted", "refused", "refused"]
    first, seventh, last = (each.comparison for each in verdicts)
    assert first.improvement.lower > seventh.improvement.lower > last.improvement.lower
    assert first.confidence < seventh.confidence < last.confidence < 1
    assert first.slices == seventh.slices == last.slices != ()
    assert "0.999 confidence" in verdicts[1].reason
    assert "candidate 7 compared with this champion" in verdicts[1].reason
    assert verdicts[1].reason.endswith("held-out documents used 7 times")
    assert "0.9999983 confidence" in verdicts[2].reason
    assert Verdict.model_validate_json(verdicts[2].model_dump_json()) == verdicts[2]


def test_worn_out_documents_are_a_warning_and_never_a_reason():
    theirs = noisy(2)
    candidate, champion = Measured("a", scores(theirs - 0.1)), Measured("b", scores(theirs))
    fresh, worn = (
        decide(candidate, champion, Register(), Turn(number=1, uses=uses))
        for uses in (MOST_USES, MOST_USES + 1)
    )
    assert (fresh.decision, fresh.warning) == ("promoted", "")
    assert worn.decision == "promoted"
    assert worn.warning.startswith("the held-out documents have been used for 21 comparisons")
    assert decide(candidate, None, Register(), Turn(uses=99)).warning == ""


def test_a_verdict_of_a_time_without_turns_is_still_read():
    verdict = gate(scores(noisy(1.9)), scores(noisy(2)))
    old = verdict.model_dump()
    del old["comparison"]["turn"]
    assert Verdict.model_validate(old).comparison.turn is None
    assert Verdict.model_validate(old).warning == ""


def test_a_tie_is_refused():
    theirs = scores(noisy(2))
    verdict = gate(theirs, theirs)
    assert verdict.decision == "refused"
    improvement = verdict.comparison.improvement
    assert (improvement.lower, improvement.value, improvement.upper) == (0, 0, 0)


@pytest.mark.parametrize(("gain", "decision"), [(0.05, "refused"), (0.2, "promoted")])
def test_an_improvement_must_exceed_the_least(gain, decision):
    theirs = noisy(2)
    verdict = gate(scores(theirs - gain), scores(theirs), min_improvement=0.1)
    assert verdict.decision == decision
    assert ("by more than 0.1" in verdict.reason) == (decision == "refused")


def test_the_same_content_is_unchanged():
    verdict = decide(Measured("a", scores(2)), Measured("a", scores(2)), Register(), Turn())
    assert verdict.decision == "unchanged"
    assert verdict.candidate_bits_per_byte == verdict.champion_bits_per_byte == 2


def test_the_order_of_documents_does_not_matter():
    theirs = scores(noisy(2))
    ours = scores(noisy(1.9, seed=1))
    assert gate(ours, theirs) == gate(ours.take(np.arange(40)[::-1]), theirs)


def test_other_documents_are_no_comparison():
    with pytest.raises(ValueError, match="different documents"):
        gate(scores([1, 2]), scores([1, 2, 3]))
    with pytest.raises(ValueError, match="different documents"):
        gate(scores([1, 2]), scores([1, 2], [100, 101]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_never_promoted(bad):
    assert decide(Measured("a", scores(bad)), None, Register(), Turn()).decision == "refused"
    assert gate(scores(bad), scores(2)).decision == "refused"
    assert gate(scores(2), scores(bad)).decision == "refused"


def test_a_refusal_for_another_reason_has_the_candidates_figure():
    verdict = refuse(Measured("a", scores(1), probes=probes()), "dirty")
    assert (verdict.decision, verdict.reason) == ("refused", "dirty")
    assert verdict.probes == probes()
    assert (verdict.candidate_bits_per_byte, verdict.comparison) == (1, None)


def test_few_documents_compare_nothing():
    verdict = gate(scores([1.0, 1.1, 1.2]), scores([5.0, 5.0, 5.3]))
    assert verdict.decision == "refused"
    assert "3 documents are too few, at least 5 are needed" in verdict.reason
    assert verdict.comparison.improvement.lower is None
    five = gate(scores([1.0, 1.1, 1.2, 1.0, 1.3]), scores([5.0, 5.0, 5.3, 5.1, 4.9]))
    assert five.decision == "promoted"


def sliced(bits, languages):
    return scores(bits, language=languages)


def test_a_slice_that_is_worse_refuses_a_model_that_is_better():
    languages = ["en"] * 160 + ["ko"] * 40
    theirs = noisy(2, 200)
    ours = theirs - np.repeat([0.3, -0.2], [160, 40])
    verdict = gate(sliced(ours, languages), scores(theirs))
    assert verdict.comparison.improvement.lower > 0
    assert verdict.decision == "refused"
    assert verdict.reason.startswith("worse by more than 0.02 on language ko (0.2000 of ")
    assert "on 40 documents)" in verdict.reason
    english, korean = verdict.comparison.slices
    assert (str(english.slice), english.documents, english.regressed) == ("language en", 160, False)
    assert (str(korean.slice), korean.documents, korean.regressed) == ("language ko", 40, True)
    assert verdict.comparison.slice_confidence == pytest.approx(0.975)
    wide = gate(sliced(ours, languages), scores(theirs), max_slice_regression=0.12)
    assert wide.decision == "promoted"


def test_a_slice_that_looks_worse_by_chance_refuses_nothing():
    languages = ["en"] * 160 + ["ko"] * 40
    theirs = noisy(2, 200)
    noise = np.concatenate([np.zeros(160), noisy(0, 40, spread=1)])
    ours = theirs - 0.3 + noise + np.repeat([0, 0.4 - noise[160:].mean()], [160, 40])
    verdict = gate(sliced(ours, languages), scores(theirs))
    korean = verdict.comparison.slices[1]
    assert korean.improvement.value == pytest.approx(-0.1)
    assert verdict.decision == "promoted"


def test_small_slices_are_judged_together():
    languages = ["en"] * 30 + [f"x{number}" for number in range(30)]
    verdict = gate(sliced(noisy(1.9, 60), languages), scores(noisy(2, 60)))
    found = [(str(each.slice), each.documents) for each in verdict.comparison.slices]
    assert found == [("language en", 30), ("language other", 30)]
    alone = gate(sliced(noisy(1.9, 60), ["en"] * 45 + ["ko"] * 15), scores(noisy(2, 60)))
    assert alone.comparison.slices == ()


def measured(model_hash, bits, *passed):
    names = ("brackets", "negation")
    found = tuple(
        BehaviourScore(name=name, kind="invariance", cases=10, passed=each)
        for name, each in zip(names, passed, strict=False)
    )
    return Measured(model_hash, scores(bits), found)


def test_a_candidate_that_fails_more_of_a_behavioural_test_is_refused():
    champion = measured("b", noisy(2), 9, 4)
    refused = decide(measured("a", noisy(1.5), 8, 10), champion, Register(), Turn())
    assert refused.decision == "refused"
    assert refused.reason.startswith(
        "fails more of the behavioural tests: brackets (8 of 10 cases, not 9): "
    )
    found = [
        (each.candidate_passed, each.champion_passed) for each in refused.comparison.behaviours
    ]
    assert found == [(8, 9), (10, 4)]
    assert (
        decide(measured("a", noisy(1.5), 9, 4), champion, Register(), Turn()).decision == "promoted"
    )
    with pytest.raises(ValueError, match="not tested with the same"):
        decide(measured("a", noisy(1.5), 9), champion, Register(), Turn())


def answered(right, task="questions", names=None):
    """Results of a task, 1 or 0 each."""
    names = names or [f"q{number}" for number in range(len(right))]
    return task_table(TaskRow(task, *each) for each in zip(names, map(float, right), strict=True))


def put_to_tasks(ours, theirs, **limit):
    """The verdict on a candidate that predicts text better, and answers these."""
    tasks = [{"task": "questions"} | limit]
    pair = (
        Measured("a", scores(noisy(1.5)), tasks=ours),
        Measured("b", scores(noisy(2)), tasks=theirs),
    )
    return decide(*pair, Register(tasks=tasks), Turn())


def test_a_candidate_that_is_surely_worse_on_a_task_is_refused():
    right = np.arange(100) % 2
    fewer = right * (np.arange(100) >= 20)  # 10 of 50 right answers are lost
    refused = put_to_tasks(answered(fewer), answered(right))
    assert refused.decision == "refused"
    assert refused.reason.startswith(
        "worse than register.tasks allows on questions (0.4000, champion 0.5000, worse on 10 of "
        "100 questions, better on 0): "
    )
    (change,) = refused.comparison.tasks
    assert change.improvement.value == pytest.approx(-0.1)
    assert put_to_tasks(answered(fewer), answered(right), max_loss=0.2).decision == "promoted"
    assert put_to_tasks(answered(right), answered(right)).decision == "promoted"
    one = right * (np.arange(100) != 1)  # which chance may do
    assert put_to_tasks(answered(one), answered(right)).decision == "promoted"


def of_pairs(mean, right, theirs, **demands):
    """The verdict on a candidate whose bits per byte are 2, plus some, where pairs must improve."""
    rows = [answered(each, "pairs") for each in (right, theirs)]
    models = (
        Measured(name, scores(noisy(bits, seed=seed, spread=0.01)), tasks=each)
        for name, bits, seed, each in (("a", mean, 1, rows[0]), ("b", 2, 2, rows[1]))
    )
    return decide(*models, Register(improves="pairs", **demands), Turn())


def test_a_model_may_have_to_improve_a_task_and_not_its_bits_per_byte():
    better, as_good = [1] * 90 + [0] * 10, [1] * 55 + [0] * 45
    promoted = of_pairs(2.02, better, as_good)
    assert promoted.decision == "promoted"
    assert promoted.reason.startswith("better: pairs 0.9000, champion 0.5500; improvement 0.3500")
    assert promoted.comparison.improvement.upper < 0
    assert promoted.comparison.gain.task == "pairs"
    tie = of_pairs(1.0, as_good, as_good)  # though it needs half the bits
    assert tie.decision == "refused"
    assert tie.reason.startswith("not better on pairs with")
    assert of_pairs(2.02, better, as_good, min_improvement=0.4).decision == "refused"
    worse = of_pairs(2.4, better, as_good)
    assert worse.reason.startswith("worse by more than 0.02 of the bits per byte: pairs 0.9000")
    assert of_pairs(2, [1, 1], [0, 0]).reason.startswith("2 questions of pairs are too few")


def test_tasks_that_can_not_be_compared_promote_nobody():
    few = put_to_tasks(answered([1, 1, 0]), answered([0, 1, 1]))
    assert few.reason.startswith("3 questions of questions are too few, at least 5 are needed")
    other = answered([1] * 9, names=[f"p{number}" for number in range(9)])
    with pytest.raises(ValueError, match="answered different questions of questions"):
        put_to_tasks(answered([1] * 9), other)
    with pytest.raises(ValueError, match="not both put to the tasks"):
        put_to_tasks(answered([1] * 9), None)
    with pytest.raises(UserError, match="no arc/acc was measured; there are: questions"):
        check_tasks(answered([1]), Register(tasks=[{"task": "arc/acc"}]).tasks)


def test_right_and_wrong_answers_are_judged_as_by_mcnemars_test():
    """The exact test, one-sided: are there too many among the changed answers that got worse?"""
    random, limits = np.random.default_rng(3), Register(tasks=[{"task": "questions"}]).tasks
    agree, refused = 0, {0.5: 0, 0.75: 0}
    for trial in range(200):
        share = (0.5, 0.75)[trial % 2]  # of the changed answers that got worse
        changes, worse = random.random(200) < 0.2, random.random(200) < share
        theirs = np.where(changes, worse, random.random(200) < 0.6)
        ours = np.where(changes, ~worse, theirs)
        (change,) = compare_tasks(answered(ours), answered(theirs), limits, 0.95)
        changed = change.better_on + change.worse_on
        p = binomtest(change.worse_on, changed, alternative="greater").pvalue
        agree += change.regressed == (p < 0.05)
        refused[share] += change.regressed
    assert agree >= 185
    assert refused[0.5] <= 5 + 6  # of 100 equal candidates, and what chance may add to it
    assert refused[0.75] >= 70


def probes(**changes):
    """Of a model that breaks the bounds 1.0, 0.1 and 0.1."""
    bias = BiasScore(
        name="gender en",
        language="en",
        templates=12,
        pairs=4,
        preference=Estimate(value=1.5, lower=1.2, upper=1.8),
    )
    memorisation = Memorisation(
        prefix_tokens=50,
        continuation_tokens=50,
        training=Extraction(
            passages=100, extracted=40, share=Estimate(value=0.4, lower=0.31, upper=0.5)
        ),
        held_out=Extraction(
            passages=50, extracted=1, share=Estimate(value=0.02, lower=0.0, upper=0.1)
        ),
    )
    leakage = Leakage(
        continuations=20,
        leaking=8,
        share=Estimate(value=0.4, lower=0.22, upper=0.61),
        found={"email": 9, "phone": 3},
        leaked={"email": 7, "phone": 1},
    )
    whole = {"bias": (bias,), "memorisation": memorisation, "leakage": leakage}
    return Probes(**whole | changes)


@pytest.mark.parametrize(
    ("demands", "said"),
    [
        (
            {"max_bias": 1.0},
            "bias gender en beyond 1 bits a sentence: 1.5000 (1.2000 to 1.8000) on 12 sentences "
            "of 4 pairs; ",
        ),
        (
            {"max_extraction": 0.1},
            "more than 0.1 of the training passages are reproduced verbatim: 0.4000 (0.3100 to "
            "0.5000) of 100, held out 0.0200; ",
        ),
        (
            {"max_leakage": 0.1},
            "more than 0.1 of the continuations hold personal data from the training text: 0.4000 "
            "(0.2200 to 0.6100) of 20 (7 email, 1 phone); ",
        ),
    ],
)
def test_a_bound_that_is_broken_refuses_a_first_model_and_a_better_one(demands, said):
    found = probes()
    first = decide(Measured("a", scores(2), probes=found), None, Register(**demands), Turn())
    assert first.decision == "refused"
    assert first.reason == f"{said}the first model: 2.0000 bits per byte"
    assert first.probes == found
    better = Measured("a", scores(noisy(1.5)), probes=found)
    refused = decide(better, Measured("b", scores(noisy(2))), Register(**demands), Turn())
    assert refused.decision == "refused"
    assert refused.reason.startswith(f"{said}better: ")
    assert refused.comparison.improvement.lower > 0
    assert Verdict.model_validate_json(refused.model_dump_json()) == refused


def test_without_bounds_what_was_measured_refuses_nothing():
    verdict = decide(Measured("a", scores(2), probes=probes()), None, Register(), Turn())
    assert (verdict.decision, verdict.probes) == ("promoted", probes())


def test_within_the_interval_a_bound_is_kept():
    demands = Register(max_bias=1.3, max_extraction=0.35, max_leakage=0.3)
    verdict = decide(Measured("a", scores(2), probes=probes()), None, demands, Turn())
    assert verdict.decision == "promoted"


def test_a_champion_stays_what_it_is_under_a_new_bound():
    candidate = Measured("b", scores(2), probes=probes())
    verdict = decide(candidate, Measured("b", scores(2)), Register(max_bias=0.1), Turn())
    assert verdict.decision == "unchanged"


def test_every_bound_that_is_broken_is_named():
    demands = Register(max_bias=0.1, max_extraction=0.1, max_leakage=0.1)
    worse = Measured("a", scores(noisy(2.2)), probes=probes())
    verdict = decide(worse, Measured("b", scores(noisy(2))), demands, Turn())
    for said in ("bias gender en beyond", "verbatim", "personal data", "not better with"):
        assert said in verdict.reason
    assert "\n" not in verdict.reason


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        (Estimate(value=0.5, lower=0.4, upper=0.6), None),
        (
            Estimate(value=0.8, lower=0.7, upper=0.9),
            "more than 0.6 nats a token away from the model it began as: 0.8000 (0.7000 to 0.9000)",
        ),
        (Estimate(value=0.1, lower=None, upper=None), "drift was not measured on enough pairs"),
        (None, "drift was not measured on enough pairs"),
    ],
)
def test_a_model_that_moved_too_far_from_its_first_weights_is_refused(drift, said):
    candidate = Measured("a", scores(2), drift=drift)
    verdict = decide(candidate, None, Register(max_drift=0.6), Turn())
    assert verdict.decision == ("refused" if said else "promoted")
    assert (said or "the first model") in verdict.reason


def test_what_cannot_be_judged_is_no_pass():
    few = (
        probes()
        .bias[0]
        .model_copy(
            update={"templates": 4, "preference": Estimate(value=0.1, lower=None, upper=None)}
        )
    )
    none = Extraction(passages=0, extracted=0, share=None)
    short = probes().memorisation.model_copy(update={"training": none})
    for demands, found, said in (
        ({"max_bias": 1.0}, {"bias": (few,)}, "4 sentences of gender en are too few"),
        ({"max_bias": 1.0}, {"bias": None}, "bias was not measured"),
        ({"max_extraction": 0.1}, {"memorisation": short}, "has a passage of 100 tokens"),
        ({"max_extraction": 0.1}, {"memorisation": None}, "memorisation was not measured"),
        ({"max_leakage": 0.1}, {"leakage": None}, "leakage was not measured"),
    ):
        candidate = Measured("a", scores(2), probes=probes(**found))
        verdict = decide(candidate, None, Register(**demands), Turn())
        assert verdict.decision == "refused"
        assert said in verdict.reason


@pytest.mark.parametrize(
    ("bound", "evaluate", "key"),
    [
        ("max_bias", {"bias": {"enabled": False}}, "evaluate.bias.enabled"),
        ("max_extraction", {"safety": {"documents": 0}}, "evaluate.safety.documents"),
        ("max_leakage", {}, "evaluate.safety.generations"),
        ("max_drift", {}, "preference.kind"),
    ],
)
def test_a_bound_on_what_is_not_measured_is_one_line(bound, evaluate, key):
    values = {"name": "r", "evaluate": evaluate, "register": {bound: 0.5}}
    with pytest.raises(UserError, match=rf"register\.{bound} limits what {key}") as raised:
        parse_recipe(values)
    assert "\n" not in str(raised.value)

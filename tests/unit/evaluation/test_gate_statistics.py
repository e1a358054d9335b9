"""How often the gate errs, over simulated models whose truth is known."""

import math
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pytest

from pipelines.evaluation import gate
from pipelines.evaluation.bootstrap import bootstrap
from pipelines.evaluation.gate import Measured, decide
from pipelines.evaluation.spending import confidence_of
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Turn
from tests.simulated_gates import (
    CANDIDATES,
    DOCUMENTS,
    documents,
    least,
    own,
    pair,
    power,
    promoted,
    ratios,
    years_that_promote,
)

GATES = 600


def share_promoted(gain, gates=GATES, **demands):
    random = np.random.default_rng(20)
    promoted = 0
    for _ in range(gates):
        ours, theirs = pair(random, gain)
        candidate, champion = Measured("a", ours), Measured("b", theirs)
        verdict = decide(candidate, champion, Register(**demands), Turn())
        promoted += verdict.decision == "promoted"
    return promoted / gates


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_models_equal_in_truth_are_promoted_no_more_often_than_stated(confidence):
    rate = share_promoted(0.0, confidence=confidence)
    stated = 1 - confidence_of(1, confidence)
    margin = 1.645 * math.sqrt(stated * (1 - stated) / GATES)
    print(f"false promotions: {rate:.3f} of {GATES}, stated {stated:.3f} + {margin:.3f}")
    assert rate <= stated + margin
    assert rate > stated / 4  # and the gate is not simply shut


def test_a_year_of_equal_candidates_promotes_one_no_more_often_than_stated():
    confidences = [confidence_of(number, 0.95) for number in range(1, CANDIDATES + 1)]
    count, missed = years_that_promote(1000, least(confidences))
    margin = 1.645 * math.sqrt(1000 * 0.05 * 0.95)
    print(f"years of equal candidates that promote one: {count}, stated 50 + {margin:.0f}")
    assert 12 < count <= 50 + margin
    assert not any(promoted(*each) for each in missed)


def test_a_gate_that_has_the_same_confidence_in_each_candidate_fails_that_test(monkeypatch):
    monkeypatch.setattr(gate, "confidence_of", lambda _, confidence: confidence)
    count, missed = years_that_promote(100, least([0.95] * CANDIDATES))
    print(f"years with a promotion by the gate for single candidates: {count} of 100")
    assert count > 25
    assert not any(promoted(*each) for each in missed)


def test_a_bound_beyond_the_resamples_fails_no_more_often_than_stated():
    """On 20 documents of very different lengths; the bound by the normal distribution does."""
    random, stated, batches = np.random.default_rng(24), 1e-4, 25
    further = NormalDist().inv_cdf(stated) / NormalDist().inv_cdf(1e-3)
    failed = normal = 0
    for _ in range(batches):
        sizes, text = documents(random, (10_000, 20))
        differences = own(random, sizes, text)
        found = ratios(sizes, differences)
        for row in np.flatnonzero(abs(found) > 3.5):  # nearer ones are within any bound
            gained = np.sign(found[row]) * differences[row]
            each = bootstrap(gained, sizes[row], np.ones((20, 1), bool))
            failed += each.bounds(1 - stated)[0][0] > 0
            normal += each.values[0] > further * (each.values[0] - each.bounds(0.999)[0][0])
    expected = 2 * batches * 10_000 * stated  # both sides of each
    print(f"bounds that failed: {failed}, by the normal tail {normal}, stated {expected:.0f}")
    assert failed <= expected < 1.5 * expected < normal


def test_the_shares_of_all_candidates_are_the_allowed_error():
    spent = sum(1 - confidence_of(number, 0.9) for number in range(1, 1001))
    rest = 0.1 * 2 / math.sqrt(1000.5) / 2.612375
    assert spent + rest == pytest.approx(0.1, rel=1e-6)
    assert confidence_of(1, 0.95) == pytest.approx(0.98086, abs=1e-5)


@pytest.mark.parametrize(("gain", "first", "last"), [(0.02, 0.6, 0.03), (0.05, 0.95, 0.85)])
def test_an_improvement_is_mostly_seen_and_best_in_a_first_candidate(gain, first, last):
    asked = [0.95, *(confidence_of(number, 0.95) for number in (1, 10, CANDIDATES))]
    seen = power(gain, 200, asked)
    print(f"promoted at a gain of {gain}, {DOCUMENTS} documents: {seen} at {asked}")
    assert sorted(seen, reverse=True) == seen.tolist()
    assert seen[1] >= first
    assert seen[-1] >= last


LANGUAGES = np.repeat(["en", "ko"], [50, 30])


def share_regressed(gain, gates=300):
    """How often Korean is said to be worse than allowed; what is gained differs by language."""
    random = np.random.default_rng(21)
    gains = np.where(LANGUAGES == "ko", gain, 0.1)
    found = []
    for _ in range(gates):
        candidate, champion = pair(random, gains)
        candidate = candidate.append_column("language", pa.array(LANGUAGES))
        verdict = decide(Measured("a", candidate), Measured("b", champion), Register(), Turn())
        (regressed,) = (
            each.regressed for each in verdict.comparison.slices if each.slice.name == "ko"
        )
        assert not regressed or verdict.decision == "refused"
        found.append(regressed)
    return sum(found) / gates


def test_a_slice_that_is_as_bad_as_allowed_refuses_no_more_often_than_stated():
    rate = share_regressed(-Register().max_slice_regression)
    stated = (1 - Register().confidence) / 2  # of two slices each has half of the error allowed
    margin = 1.645 * math.sqrt(stated * (1 - stated) / 300)
    print(
        f"refused for a slice at the bound: {rate:.3f} of 300, stated {stated:.3f} + {margin:.3f}"
    )
    assert rate <= stated + margin


def test_a_slice_that_is_worse_by_a_tenth_is_mostly_seen():
    power = share_regressed(-0.1, gates=100)
    print(f"refused for a slice that is worse by 10%: {power:.2f}")
    assert power >= 0.75

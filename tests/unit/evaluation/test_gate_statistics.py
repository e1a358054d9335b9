"""How often the gate errs, over simulated pairs of models whose truth is known."""

import math

import numpy as np
import pyarrow as pa
import pytest

from pipelines.evaluation.gate import Measured, decide
from pipelines.recipe.recipe import Register

GATES = 600
DOCUMENTS = 80  # about as many as the default recipe holds out


def pair(random, gain):
    """Scores of a candidate and a champion; the candidate needs `gain` fewer bits in truth.

    Lengths are lognormal, some hundred times the median. What a byte takes differs between
    documents, for both models alike, so their nats are highly correlated. On top lie each
    document's leaning to one of them, heavy-tailed, weaker in long documents and as often to
    either side, and the noise of single tokens. So at `gain` 0 the models are equal in truth.
    """
    sizes = np.maximum(40, np.exp(random.normal(8, 1.3, DOCUMENTS))).round()
    champion = sizes * np.exp(random.normal(0, 0.3, DOCUMENTS))
    leaning = 0.03 * random.standard_t(4, DOCUMENTS) * (sizes / 3000) ** -0.15
    tokens = 0.3 * np.sqrt(sizes) * random.normal(size=DOCUMENTS)
    candidate = champion * (1 - gain + leaning) + tokens
    ids = [f"{number:04d}" for number in range(DOCUMENTS)]
    nats = (math.log(2) * bits for bits in (candidate, champion))
    return [pa.table({"doc_id": ids, "bytes": sizes.astype(int), "nats": each}) for each in nats]


def share_promoted(gain, gates=GATES, **demands):
    random = np.random.default_rng(20)
    promoted = 0
    for _ in range(gates):
        candidate, champion = pair(random, gain)
        verdict = decide(Measured("a", candidate), Measured("b", champion), Register(**demands))
        promoted += verdict.decision == "promoted"
    return promoted / gates


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_models_equal_in_truth_are_promoted_no_more_often_than_stated(confidence):
    rate = share_promoted(0.0, confidence=confidence)
    stated = 1 - confidence
    print(f"false promotions: {rate:.3f} of {GATES}, stated {stated:.3f}")
    assert rate <= stated
    assert rate > stated / 4  # and the gate is not simply shut


def test_an_improvement_of_two_percent_is_mostly_seen():
    power = share_promoted(0.02, gates=300)
    print(f"power at 2%, {DOCUMENTS} documents: {power:.3f}")
    assert power >= 0.75


LANGUAGES = np.repeat(["en", "ko"], [50, 30])


def share_regressed(gain, gates=300):
    """How often Korean is said to be worse than allowed; what is gained differs by language."""
    random = np.random.default_rng(21)
    gains = np.where(LANGUAGES == "ko", gain, 0.1)
    found = []
    for _ in range(gates):
        candidate, champion = pair(random, gains)
        candidate = candidate.append_column("language", pa.array(LANGUAGES))
        verdict = decide(Measured("a", candidate), Measured("b", champion), Register())
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

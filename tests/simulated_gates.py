"""Models whose truth is known, and how often the gate promotes them.

Lengths are lognormal, some hundred times the median. What a byte takes differs between documents,
for all models alike, so their nats are highly correlated. On top lie each document's leaning to one
of two models, heavy-tailed, weaker in long documents and as often to either side, and the noise of
single tokens. So at a gain of 0 the models are equal in truth.
"""

import math

import numpy as np
import pyarrow as pa

from pipelines.evaluation.bootstrap import bootstrap
from pipelines.evaluation.gate import Measured, decide
from pipelines.evaluation.spending import confidence_of
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Turn

DOCUMENTS = 80  # about as many as the default recipe holds out
CANDIDATES = 52  # of a year


def drawn(random, models, gain=0.0, documents=DOCUMENTS):
    """Return bytes [N] and the bits of a champion and of `models` others, [1 + models, N].

    A model's leaning and its tokens' noise are its own. So what the others gain over the champion
    on one document has the champion's part in common, as in a year of candidates.
    """
    sizes = np.maximum(40, np.exp(random.normal(8, 1.3, documents))).round()
    text = sizes * np.exp(random.normal(0, 0.3, documents))
    shape = (1 + models, documents)
    leaning = 0.03 / math.sqrt(2) * random.standard_t(4, shape) * (sizes / 3000) ** -0.15
    tokens = 0.3 / math.sqrt(2) * np.sqrt(sizes) * random.normal(size=shape)
    bits = text * (1 + leaning) + tokens
    bits[1:] -= gain * text
    return sizes, bits


def table(sizes, bits):
    """Return a model's scores."""
    ids = [f"{number:04d}" for number in range(len(sizes))]
    return pa.table({"doc_id": ids, "bytes": sizes.astype(int), "nats": math.log(2) * bits})


def pair(random, gain):
    """Return the scores of a candidate that needs `gain` fewer bits in truth, and the champion."""
    sizes, (champion, candidate) = drawn(random, 1, gain)
    return table(sizes, candidate), table(sizes, champion)


def ratios(sizes, bits):
    """Return each candidate's improvement in its standard errors, [models]."""
    differences = bits[0] - bits[1:]
    improvement = differences.sum(axis=1, keepdims=True) / sizes.sum()
    own = (differences - improvement * sizes) / (1 - sizes / sizes.sum())
    return differences.sum(axis=1) / np.sqrt((own**2).sum(axis=1))


def promoted(sizes, bits, number):
    """Return whether the gate promotes the candidate of this number."""
    candidate, champion = table(sizes, bits[number]), table(sizes, bits[0])
    turn = Turn(number=number, uses=number)
    verdict = decide(Measured("a", candidate), Measured("b", champion), Register(), turn)
    return verdict.decision == "promoted"


def years_that_promote(years, least):
    """Return in how many years of equal candidates the gate promotes one, and the nearest misses.

    Args:
        years: How many are simulated.
        least: [CANDIDATES], the improvement in standard errors below which no candidate of this
            number is promoted. The gate is not asked about those, which takes most of the time.

    Returns:
        The number of years, and `(sizes, bits, number)` of the 50 candidates that came closest to
        `least` without being shown to the gate.
    """
    random = np.random.default_rng(22)
    count, missed = 0, []
    for _ in range(years):
        sizes, bits = drawn(random, CANDIDATES)
        shares = ratios(sizes, bits) / least
        count += any(promoted(sizes, bits, place + 1) for place in np.flatnonzero(shares >= 1))
        place = int(np.where(shares < 1, shares, -np.inf).argmax())
        missed.append((shares[place], sizes, bits, place + 1))
    missed.sort(key=lambda each: each[0])
    return count, [each[1:] for each in missed[-50:]]


def power(gain, gates, numbers=(1, 10, CANDIDATES), confidence=0.95):
    """Return how often a candidate that is better by `gain` is promoted.

    The keys are the candidate's number among those of the champion, and `alone` for a gate that
    has the same confidence in each.
    """
    random = np.random.default_rng(23)
    asked = {"alone": confidence} | {str(each): confidence_of(each, confidence) for each in numbers}
    seen = dict.fromkeys(asked, 0)
    for _ in range(gates):
        sizes, (champion, candidate) = drawn(random, 1, gain)
        found = bootstrap(champion - candidate, sizes, np.ones((len(sizes), 1), bool))
        for key, each in asked.items():
            seen[key] += bool(found.bounds(each)[0][0] > 0)
    return {key: count / gates for key, count in seen.items()}

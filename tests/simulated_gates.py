"""Models whose truth is known, and how often the gate promotes them.

Lengths are lognormal, some hundred times the median. What a byte takes differs between documents,
for all models alike, so their nats are highly correlated. On top lie each document's leaning to one
of two models, heavy-tailed, weaker in long documents and as often to either side, and the noise of
single tokens. So at a gain of 0 the models are equal in truth.
"""

import math
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from pipelines.evaluation.bootstrap import bootstrap
from pipelines.evaluation.gate import Measured, decide
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Turn

DOCUMENTS = 80  # about as many as the default recipe holds out
CANDIDATES = 52  # of a year


def pair(random, gain):
    """Return the scores of a candidate that needs `gain` fewer bits in truth, and the champion."""
    sizes, text = documents(random, DOCUMENTS)
    ours = text * (1 - gain) + own(random, sizes, text)
    return table(sizes, ours), table(sizes, text)


def year(random):
    """Return bytes [N] and the bits of a champion and its candidates, [1 + CANDIDATES, N].

    Half of the variance between two models is each one's own. So what the candidates gain over the
    champion on one document has the champion's part in common.
    """
    sizes, text = documents(random, DOCUMENTS)
    each = np.broadcast_to(text, (1 + CANDIDATES, DOCUMENTS))
    return sizes, text + own(random, sizes, each) / math.sqrt(2)


def documents(random, shape):
    """Return each document's bytes, and the bits that it takes any model about."""
    sizes = np.maximum(40, np.exp(random.normal(8, 1.3, shape))).round()
    return sizes, sizes * np.exp(random.normal(0, 0.3, shape))


def own(random, sizes, text):
    """Return the bits by which a model differs from another, of the shape of `text`."""
    leaning = 0.03 * random.standard_t(4, text.shape) * (sizes / 3000) ** -0.15
    return text * leaning + 0.3 * np.sqrt(sizes) * random.normal(size=text.shape)


def table(sizes, bits):
    """Return a model's scores."""
    ids = [f"{number:04d}" for number in range(len(sizes))]
    return pa.table({"doc_id": ids, "bytes": sizes.astype(int), "nats": math.log(2) * bits})


def ratios(sizes, differences):
    """Return each gate's improvement in its standard errors, [gates], of [gates, N] differences."""
    total = sizes.sum(axis=-1, keepdims=True)
    improvement = differences.sum(axis=1, keepdims=True) / total
    residuals = (differences - improvement * sizes) / (1 - sizes / total)
    return differences.sum(axis=1) / np.sqrt((residuals**2).sum(axis=1))


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
        sizes, bits = year(random)
        shares = ratios(sizes, bits[0] - bits[1:]) / least
        count += any(promoted(sizes, bits, place + 1) for place in np.flatnonzero(shares >= 1))
        place = int(np.where(shares < 1, shares, -np.inf).argmax())
        missed.append((shares[place], sizes, bits, place + 1))
    missed.sort(key=lambda each: each[0])
    return count, [each[1:] for each in missed[-50:]]


def power(gain, gates, confidences):
    """Return how often a candidate that is better by `gain` is promoted with each confidence."""
    random = np.random.default_rng(23)
    seen = np.zeros(len(confidences))
    for _ in range(gates):
        candidate, champion = pair(random, gain)
        sizes, *bits = (
            np.asarray(column, np.float64)
            for column in (champion["bytes"], champion["nats"], candidate["nats"])
        )
        found = bootstrap(bits[0] - bits[1], sizes, np.ones((DOCUMENTS, 1), bool))
        seen += [found.bounds(each)[0][0] > 0 for each in confidences]
    return seen / gates


def least(confidences):
    """Return improvements in standard errors that the gate surely takes for chance."""
    return np.array([0.8 * NormalDist().inv_cdf(each) for each in confidences])

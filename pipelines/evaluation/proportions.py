"""A share of successes, and within what it lies for more trials of their kind."""

import math
from statistics import NormalDist

from pipelines.core.verdict import Estimate


def proportion(successes: int, trials: int, confidence: float) -> Estimate:
    """The share of at least one trial; each bound of its interval holds with this confidence.

    The interval is Wilson's ("Probable inference, the law of succession, and statistical
    inference", 1927), which has a width also where all trials or none succeed.
    """
    z = NormalDist().inv_cdf(confidence)
    share, squared = successes / trials, z * z / trials
    middle = (share + squared / 2) / (1 + squared)
    reach = z / (1 + squared) * math.sqrt((share * (1 - share) + squared / 4) / trials)
    # At the ends the sums come out as 0 and 1 but for rounding.
    return Estimate.of(share, max(0.0, middle - reach), min(1.0, middle + reach))

"""Confidence bounds of ratios of sums over documents, such as bits per byte, by the bootstrap.

A figure of a set of documents is Σ numerator / Σ denominator, and its bounds say what it might be
on other documents of the same kind. Two kinds of bound are computed and the more cautious one is
used: the percentile of the resampled figures, and the bootstrap-t, where each resample's figure is
studentised by its own standard error (Efron and Tibshirani, "An Introduction to the Bootstrap",
1993, chapters 12 and 13). The former is too narrow for few or skewed documents, the latter for
many documents with heavy tails. Documents are weighted by independent Poisson(1) counts (Hanley and
MacGibbon, "Creating non-parametric bootstrap samples using Poisson frequencies", 2006), so that
resamples are matrix products over blocks of documents and need little memory.

Beyond a confidence of 0.999 the resamples are too few to show how far a figure may be off. A bound
there lies further out than the one at 0.999 by the ratio of the same quantiles of Student's t. Its
degrees of freedom are the effective number of documents, (Σ denominator)² / Σ denominator² (Kish,
"Survey Sampling", 1965), because long documents make the standard error uncertain. By the normal
distribution, bounds of 20 documents at 0.9999 failed nearly three times as often as they may.

A long document pulls the figure towards itself and so hides its own deviation. The standard error
corrects this: each residual is divided by one minus the document's share of the denominator, as
in HC3 (MacKinnon and White, 1985); the ratio is a regression through the origin, so HC3 applies.
If one document makes up nearly the whole set, the bounds are therefore wide.

The module also computes the interval of a share of successes, and the figures of a table of
per-document scores (doc_id, bytes, tokens, nats).
"""

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.run.verdict import Estimate


def proportion(successes: int, trials: int, confidence: float) -> Estimate:
    """Return the share of successes, with an interval whose bounds each hold with `confidence`.

    There must be at least one trial. The interval is Wilson's ("Probable inference, the law of
    succession, and statistical inference", 1927), which has a width even if all trials or none
    succeed.
    """
    z = NormalDist().inv_cdf(confidence)
    share, squared = successes / trials, z * z / trials
    middle = (share + squared / 2) / (1 + squared)
    reach = z / (1 + squared) * math.sqrt((share * (1 - share) + squared / 4) / trials)
    # If none or all succeed, the sums are 0 and 1 except for rounding errors.
    return Estimate.of(share, max(0.0, middle - reach), min(1.0, middle + reach))


_MOST = 709  # exp overflows above this; a diverged model can reach it, or nan


def bits_per_byte(scores: pa.Table) -> float:
    """Return the bits per byte over all documents, which can be compared between tokenizers."""
    return _total(scores, "nats") / math.log(2) / _total(scores, "bytes")


def token_perplexity(scores: pa.Table) -> float:
    """Return the perplexity over all tokens, comparable only between models with one tokenizer."""
    nats = _total(scores, "nats") / _total(scores, "tokens")
    return math.exp(nats) if nats < _MOST else math.inf


def _total(scores: pa.Table, column: str) -> float:
    return math.fsum(scores[column].to_pylist())


Floats = npt.NDArray[np.float64]
Groups = npt.NDArray[np.bool_]

RESAMPLES = 10_000
_RESOLVED = 1e-3  # the least error that the resamples show: ten of them lie beyond
LEAST_DOCUMENTS = 5  # fewer get no bounds: too many resamples would hold only one of them
# The count that each random byte stands for, close to Poisson(1): mean and variance are exactly 1,
# and the third central moment is 0.98. Drawing true Poisson counts is slower.
_COUNTS = np.repeat(np.arange(6.0), [94, 95, 46, 16, 4, 1])
# The counts of two bytes at once, the lower one first: fewer are looked up.
_PAIRS = np.stack([np.tile(_COUNTS, 256), np.repeat(_COUNTS, 256)], axis=1)
_BLOCK = 1 << 18  # counts drawn at once: 2 MiB, which fits in a core's cache
_BLOCK_DOCUMENTS = 1024
_ROUNDING = 1e-9  # a smaller relative error comes from the arithmetic, not from the documents


@dataclass(frozen=True)
class Bootstrap:
    """The figures of K groups of documents, and their deviations on R resamples.

    Attributes:
        values: [K], Σ numerator / Σ denominator.
        errors: [K], the standard errors of the values.
        documents: [K], the effective numbers of documents.
        deviations: [R, K], each resample's figure minus the value.
        studentised: [R, K], the deviations in standard errors of the resample.
    """

    values: Floats
    errors: Floats
    documents: Floats
    deviations: Floats
    studentised: Floats

    def bounds(self, confidence: float) -> tuple[Floats, Floats]:
        """Return the lower and upper bounds, [K] each; each one alone holds with `confidence`.

        A bound that cannot be computed, because there are too few documents, is infinite.
        """
        low, high = self._reach(1 - confidence, "lower"), self._reach(confidence, "higher")
        return self.values - high, self.values - low

    def _reach(self, quantile: float, method: Literal["lower", "higher"]) -> Floats:
        """Return the resamples' deviation at a quantile, [K], by the more cautious bound."""
        shown = min(max(quantile, _RESOLVED), 1 - _RESOLVED)
        plain, studentised = (
            np.quantile(each, shown, axis=0, method=method) * self._further(quantile, shown)
            for each in (self.deviations, self.studentised)
        )
        wider = np.minimum if method == "lower" else np.maximum
        bounded = np.isfinite(self.errors)
        scaled = studentised * np.where(bounded, self.errors, 0.0)
        certain = self.errors <= _ROUNDING * np.abs(self.values)
        reach = np.where(certain, 0.0, wider(plain, scaled))
        return np.where(bounded, reach, -math.inf if method == "lower" else math.inf)

    def _further(self, quantile: float, shown: float) -> Floats | float:
        """Return how much further out a quantile lies than one that the resamples show, [K]."""
        if quantile == shown:
            return 1.0
        from scipy.special import stdtrit  # takes a third of a second

        further: Floats = stdtrit(self.documents, quantile) / stdtrit(self.documents, shown)
        return further


def bootstrap(
    numerators: Floats, denominators: Floats, groups: Groups, resamples: int = RESAMPLES
) -> Bootstrap:
    """Resample the documents; the same numbers in the same order give the same bounds.

    Args:
        numerators: [N], such as the nats of each document.
        denominators: [N], such as the bytes of each document; not negative.
        groups: [N, K], which documents belong to each figure; K is 64 at most.
        resamples: R; the random error of a bound falls with its square root.
    """
    counts = groups.sum(axis=0)
    total_D = denominators @ groups  # noqa: N806
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (numerators @ groups) / total_D
        # Deviations from one common ratio, because moments of large equal numbers would cancel.
        middle = numerators.sum() / denominators.sum()
        residuals = numerators - middle * denominators
        own = residuals[:, None] - (values - middle) * denominators[:, None]
        leverage = denominators[:, None] / total_D
        documents = total_D**2 / (denominators**2 @ groups)
        errors = np.sqrt(np.where(groups, (own / (1 - leverage)) ** 2, 0.0).sum(axis=0)) / total_D
    few = counts < LEAST_DOCUMENTS
    errors[few | np.isnan(errors)] = math.inf  # nan: one document is the whole group
    moments = _resampled_moments(residuals, denominators, groups, resamples)
    return Bootstrap(values, errors, documents, *_deviations(moments, values - middle))


def overall_ratio(numerators: Floats, denominators: Floats, confidence: float) -> Estimate:
    """Return Σ numerator / Σ denominator over all documents; each bound holds with `confidence`."""
    found = bootstrap(numerators, denominators, np.ones((len(numerators), 1), bool))
    return Estimate.of(found.values[0], *(bound[0] for bound in found.bounds(confidence)))


def _deviations(moments: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return plain and studentised deviations [R, K] of moments [K, R, 5] from the values [K].

    The moments and the values are centred on the same ratio.
    """
    sum_u, sum_d, sum_uu, sum_ud, sum_dd = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sum_u / sum_d
        squares = sum_uu - 2 * ratio * sum_ud + ratio**2 * sum_dd
        # An empty resample has no deviation, and one of a single document has no standard error.
        off = np.where(sum_d > 0, ratio - values[:, None], 0.0)
        some = squares > _ROUNDING * (sum_uu + ratio**2 * sum_dd)
        studentised = np.where(some, off * sum_d / np.sqrt(np.maximum(squares, 0)), 0.0)
    return off.T, studentised.T


def _resampled_moments(
    numerators: Floats, denominators: Floats, groups: Groups, resamples: int
) -> Floats:
    """Return Σw u, Σw d, Σw u², Σw u d and Σw d² of each group and resample, [K, R, 5].

    Groups overlap, so documents are processed cell by cell; a cell holds the documents of the same
    groups. A document's weights w are drawn once and are used in each of its groups.
    """
    u, d = numerators, denominators
    columns = np.stack([u, d, u * u, u * d, d * d], axis=1)
    generator = np.random.SFC64(_seed(columns))
    moments = np.zeros((groups.shape[1], resamples, 5))
    names = groups @ (np.uint64(1) << np.arange(groups.shape[1], dtype=np.uint64))
    _, firsts, cell_of = np.unique(names, return_index=True, return_inverse=True)
    ends = np.cumsum(np.bincount(cell_of))[:-1]
    cells = np.split(np.argsort(cell_of, kind="stable"), ends)
    for membership, cell in zip(groups[firsts], cells, strict=True):
        members = np.flatnonzero(membership)
        for start in range(0, len(cell), _BLOCK_DOCUMENTS):
            block = columns[cell[start : start + _BLOCK_DOCUMENTS]]
            for rows in _row_blocks(resamples, _BLOCK // len(block)):
                weights = _draw(generator, rows.stop - rows.start, len(block))
                moments[members, rows] += weights @ block
    return moments


def _row_blocks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _draw(generator: np.random.SFC64, rows: int, columns: int) -> Floats:
    count = rows * columns
    drawn = generator.random_raw(-(-count // 8)).view(np.uint16)
    return _PAIRS.take(drawn, axis=0).reshape(-1)[:count].reshape(rows, columns)


def _seed(content: Floats) -> int:
    """Return a seed made from the content, so that a comparison always draws the same resamples."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(content).tobytes()).digest()[:8])

"""Confidence bounds of ratios of sums over documents, such as bits per byte, by the bootstrap.

A figure of a set of documents is Σ numerator / Σ denominator, and its bounds say how it might come
out on other documents of the same kind. Two kinds of bound are taken and the more cautious one
holds: the percentile of the resampled figures, and the bootstrap-t, where each resample's figure is
studentised by its own standard error (Efron and Tibshirani, "An Introduction to the Bootstrap",
1993, chapters 12 and 13). The former promises too much of few or skewed documents, the latter of
many with heavy tails. Documents are weighted by independent Poisson(1) counts (Hanley and
MacGibbon, "Creating non-parametric bootstrap samples using Poisson frequencies", 2006), so that
resamples are matrix products over blocks of documents, in little memory.

A long document pulls the figure towards itself and so hides its own deviation. The standard error
takes that back: each residual is divided by one less the document's share of the denominator, as
in HC3 (MacKinnon and White, 1985), of which the ratio, a regression through the origin, is a case.
Where one document is nearly all there is, the bounds are accordingly wide.

A share of successes, and within what it lies for more trials of their kind.

One figure from a table of per-document scores (doc_id, bytes, tokens, nats).
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


_MOST = 709  # exp overflows beyond; a diverged model gets there, or to nan


def bits_per_byte(scores: pa.Table) -> float:
    """Over all documents; comparable between tokenizers."""
    return _total(scores, "nats") / math.log(2) / _total(scores, "bytes")


def token_perplexity(scores: pa.Table) -> float:
    """Over all tokens; comparable only where the tokenizer is the same."""
    nats = _total(scores, "nats") / _total(scores, "tokens")
    return math.exp(nats) if nats < _MOST else math.inf


def _total(scores: pa.Table, column: str) -> float:
    return math.fsum(scores[column].to_pylist())


Floats = npt.NDArray[np.float64]
Groups = npt.NDArray[np.bool_]

RESAMPLES = 10_000
LEAST_DOCUMENTS = 5  # fewer have no bounds: too many resamples hold a single one of them
# A random byte's Poisson(1) count. Their mean and variance are exactly 1, and the third central
# moment is 0.98; no true Poisson count is drawn as fast.
_COUNTS = np.repeat(np.arange(6.0), [94, 95, 46, 16, 4, 1])
_BLOCK = 1 << 18  # counts drawn at once: 2 MiB, which stay in a core's cache
_BLOCK_DOCUMENTS = 1024
_ROUNDING = 1e-9  # a relative error below it is of the arithmetic, not of the documents


@dataclass(frozen=True)
class Bootstrap:
    """The figures of K groups of documents, and how they come out on resamples.

    Attributes:
        values: [K], Σ numerator / Σ denominator.
        errors: [K], their standard errors.
        deviations: [R, K], of each resample's figure from the value.
        studentised: [R, K], the same in standard errors of the resample.
    """

    values: Floats
    errors: Floats
    deviations: Floats
    studentised: Floats

    def bounds(self, confidence: float) -> tuple[Floats, Floats]:
        """Lower and upper bounds, [K] each; each alone holds with this confidence.

        Where there is none, as of too few documents, it is infinite.
        """
        low, high = self._reach(1 - confidence, "lower"), self._reach(confidence, "higher")
        return self.values - high, self.values - low

    def _reach(self, quantile: float, method: Literal["lower", "higher"]) -> Floats:
        """How far resamples lie off at a quantile, [K], by the more cautious of both kinds."""
        plain, studentised = (
            np.quantile(each, quantile, axis=0, method=method)
            for each in (self.deviations, self.studentised)
        )
        wider = np.minimum if method == "lower" else np.maximum
        bounded = np.isfinite(self.errors)
        scaled = studentised * np.where(bounded, self.errors, 0.0)
        certain = self.errors <= _ROUNDING * np.abs(self.values)
        reach = np.where(certain, 0.0, wider(plain, scaled))
        return np.where(bounded, reach, -math.inf if method == "lower" else math.inf)


def bootstrap(
    numerators: Floats, denominators: Floats, groups: Groups, resamples: int = RESAMPLES
) -> Bootstrap:
    """Resample documents; the same numbers in the same order give the same bounds.

    Args:
        numerators: [N], such as nats of each document.
        denominators: [N], such as bytes; not negative.
        groups: [N, K], which documents each figure is of; K is 64 at most.
        resamples: R; a bound's own noise falls with its square root.
    """
    counts = groups.sum(axis=0)
    total_D = denominators @ groups  # noqa: N806
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (numerators @ groups) / total_D
        # Deviations from one ratio for all: moments of large equal numbers would cancel.
        middle = numerators.sum() / denominators.sum()
        residuals = numerators - middle * denominators
        own = residuals[:, None] - (values - middle) * denominators[:, None]
        leverage = denominators[:, None] / total_D
        errors = np.sqrt(np.where(groups, (own / (1 - leverage)) ** 2, 0.0).sum(axis=0)) / total_D
    few = counts < LEAST_DOCUMENTS
    errors[few | np.isnan(errors)] = math.inf  # nan: one document is all there is
    moments = _resampled_moments(residuals, denominators, groups, resamples)
    return Bootstrap(values, errors, *_deviations(moments, values - middle))


def _deviations(moments: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Plain and studentised, [R, K], of moments [K, R, 5] from the values [K], centred alike."""
    sum_u, sum_d, sum_uu, sum_ud, sum_dd = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sum_u / sum_d
        squares = sum_uu - 2 * ratio * sum_ud + ratio**2 * sum_dd
        # A resample of no document says nothing, and one of a single document nothing of errors.
        off = np.where(sum_d > 0, ratio - values[:, None], 0.0)
        some = squares > _ROUNDING * (sum_uu + ratio**2 * sum_dd)
        studentised = np.where(some, off * sum_d / np.sqrt(np.maximum(squares, 0)), 0.0)
    return off.T, studentised.T


def _resampled_moments(
    numerators: Floats, denominators: Floats, groups: Groups, resamples: int
) -> Floats:
    """[K, R, 5]: Σw u, Σw d, Σw u², Σw u d and Σw d² of each group under each resample's weights.

    Groups overlap, so documents are taken cell by cell: those that belong to the same groups. A
    document's weights are drawn once, and count in each of its groups.
    """
    u, d = numerators, denominators
    columns = np.stack([u, d, u * u, u * d, d * d], axis=1)
    generator = np.random.Generator(np.random.SFC64(_seed(columns)))
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


def _draw(generator: np.random.Generator, rows: int, columns: int) -> Floats:
    drawn = np.frombuffer(generator.bytes(rows * columns), np.uint8)
    return _COUNTS.take(drawn).reshape(rows, columns)


def _seed(content: Floats) -> int:
    """Make the seed from the content: the same comparison draws the same resamples anywhere."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(content).tobytes()).digest()[:8])

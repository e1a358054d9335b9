"""Expectations about what a tokenizer makes of text, and about documents' lengths in tokens."""

import math
import re
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import ColumnAggregateExpectation
from great_expectations.expectations.metrics import (
    ColumnAggregateMetricProvider,
    column_aggregate_value,
)
from scipy.stats import chi2

from pipelines.data.tokens.token_shards import length_histogram
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.validation.expectations.sentence import AssessedVariant, Sentence

# Han, Hiragana and Katakana are written without spaces: there a character counts as a word.
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+")
_BATCH = 256  # texts encoded at once
_CONFIDENCE = 0.999  # that an index beyond what chance gives is none of its doing


class TokenizerEconomy(ColumnAggregateMetricProvider):
    """Tokens, words and bytes of a column of texts, by a saved tokenizer."""

    metric_name = "column.tokenizer_economy"
    value_keys = ("tokenizer",)

    @column_aggregate_value(engine=PandasExecutionEngine, filter_column_isnull=True)
    def _pandas(cls, column: Any, tokenizer: str, **_: Any) -> dict[str, int]:
        encoder = _encoder(tokenizer)
        texts = column.tolist()
        batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
        return {
            "words": sum(sum(1 for _ in _WORD.finditer(text)) for text in texts),
            "bytes": sum(len(text.encode()) for text in texts),
            # Less the end-of-document token, which is no part of the text.
            "tokens": sum(len(ids) - 1 for batch in batches for ids in encoder.encode(batch)),
        }


class _TokenizerRatio(Sentence, ColumnAggregateExpectation):
    """A ratio of the two, between bounds."""

    tokenizer: str
    min_value: float | None = None
    max_value: float | None = None

    metric_dependencies = ("column.tokenizer_economy",)
    success_keys = ("tokenizer", "min_value", "max_value")

    def ratio(self, economy: dict[str, int]) -> float | None:
        """Return the observed value; None of no text."""
        raise NotImplementedError

    def _validate(
        self,
        metrics: dict[str, Any],
        runtime_configuration: Any = None,
        execution_engine: Any = None,
    ) -> Any:
        ratio = {"ratio": self.ratio(metrics["column.tokenizer_economy"])}
        return self._validate_metric_value_between("ratio", ratio)


class ExpectColumnTokensPerWordToBeBetween(_TokenizerRatio):
    """Expect a tokenizer's fertility, tokens a word, to lie between bounds.

    Fertility is Rust et al. 2021, "How Good is Your Tokenizer?": near 1 where the vocabulary
    covers the language, several where it was trained on another. A word is a run of characters
    without white space; in Chinese and Japanese each character is one.

        batch.validate(
            ExpectColumnTokensPerWordToBeBetween(
                column="text", tokenizer="outputs/preprocess/tokenizer", max_value=2.5
            )
        )

    Args:
        column: of texts.
        tokenizer: a folder that holds a `tokenizer.json`, or that file's folder in a model.
        min_value: tokens a word, inclusive.
        max_value: tokens a word, inclusive.
    """

    def ratio(self, economy: dict[str, int]) -> float | None:
        """Return tokens a word."""
        return economy["tokens"] / economy["words"] if economy["words"] else None

    def sentence(self) -> str:
        """Return what is demanded."""
        return f"a word must be {_between(self.min_value, self.max_value)} tokens on average."


class ExpectColumnBytesPerTokenToBeBetween(_TokenizerRatio):
    """Expect a token to stand for so many bytes of UTF-8 text, on average.

        batch.validate(
            ExpectColumnBytesPerTokenToBeBetween(
                column="text", tokenizer="outputs/preprocess/tokenizer", min_value=3.0
            )
        )

    Args:
        column: of texts.
        tokenizer: a folder that holds a `tokenizer.json`.
        min_value: bytes a token, inclusive.
        max_value: bytes a token, inclusive.
    """

    def ratio(self, economy: dict[str, int]) -> float | None:
        """Return bytes a token."""
        return economy["bytes"] / economy["tokens"] if economy["tokens"] else None

    def sentence(self) -> str:
        """Return what is demanded."""
        return f"a token must be {_between(self.min_value, self.max_value)} bytes on average."


class LengthHistogram(ColumnAggregateMetricProvider):
    """`length_histogram` of a column of lengths."""

    metric_name = "column.length_histogram"

    @column_aggregate_value(engine=PandasExecutionEngine, filter_column_isnull=True)
    def _pandas(cls, column: Any, **_: Any) -> list[int]:
        return length_histogram(column.to_numpy())


class ExpectColumnLengthDriftToBeAtMost(AssessedVariant, ColumnAggregateExpectation):
    """Expect documents to be about as long, in tokens, as those of an earlier version.

    The drift is the Population Stability Index over the bins of `length_histogram`; by the
    customary rule (Siddiqi 2006, "Credit Risk Scorecards") less than 0.1 is none and more than 0.25
    is a different population. Of few documents chance alone gives more: of n and m of one
    distribution the index is chi-squared with bins - 1 degrees of freedom, times 1/n + 1/m
    (Yurdakul 2018, "Statistical Properties of Population Stability Index"). What it gives 999 times
    in 1000 passes.

        batch.validate(
            ExpectColumnLengthDriftToBeAtMost(
                column="tokens", reference=length_histogram(old_lengths), max_value=0.25
            )
        )

    Args:
        column: of lengths, one a document.
        reference: `pipelines.data.tokens.token_shards.length_histogram` of the earlier version.
        max_value: the largest index that is no drift.
    """

    reference: list[int]
    max_value: float = 0.25

    metric_dependencies = ("column.length_histogram",)
    success_keys = ("reference", "max_value")

    def sentence(self) -> str:
        """Return what is demanded."""
        return (
            "lengths must be distributed as in the previous version: Population Stability Index "
            f"at most {self.max_value:g}, or what chance gives."
        )

    def decide(self, metrics: dict[str, Any]) -> tuple[bool, Any]:
        """Return an index within the bound; the index."""
        index, chance = stability_index(self.reference, metrics["column.length_histogram"])
        allowed = max(self.max_value, chance)
        return index <= allowed, index


def stability_index(reference: list[int], found: list[int]) -> tuple[float, float]:
    """Return the Population Stability Index of two histograms, and how large chance may make it."""
    counts = np.array([*zip_longest(reference, found, fillvalue=0)], np.float64).reshape(-1, 2)
    if not counts.sum(axis=0).all():
        return math.inf, 0.0
    counts = _without_rare_bins(counts)
    # Half a document more in each bin, so that an empty one has a logarithm.
    before, now = ((counts + 0.5) / (counts + 0.5).sum(axis=0)).T
    freedom = len(counts) - 1
    chance = chi2.ppf(_CONFIDENCE, freedom) * (1 / counts.sum(axis=0)).sum() if freedom else 0.0
    return float(((now - before) * np.log(now / before)).sum()), float(chance)


def _without_rare_bins(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Neighbouring bins [bins, 2] merged until each should hold five documents of either side.

    Fewer are too few for the distribution of the index (Cochran 1954, of chi-squared).
    """
    shares = counts.sum(axis=1) / counts.sum()
    least = 5 / counts.sum(axis=0).min()
    bins, held = [0], 0.0
    for number, share in enumerate(shares):
        if held >= least and shares[number:].sum() >= least:
            bins.append(number)
            held = 0.0
        held += share
    merged: npt.NDArray[np.float64] = np.add.reduceat(counts, bins)
    return merged


@lru_cache(maxsize=1)
def _encoder(folder: str) -> Encoder:
    return Encoder(Path(folder))


def _between(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"

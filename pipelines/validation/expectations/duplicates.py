"""Expectations that few rows repeat an earlier one, exactly or nearly."""

from typing import Any

import numpy as np
import numpy.typing as npt
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    column_condition_partial,
)

from pipelines.data.duplicates.minhash import Signer, band_keys, bands, similar, sketches
from pipelines.validation.expectations.sentence import ReasonedRows, percent


class ValuesNotRepeated(ColumnMapMetricProvider):
    """Whether no earlier row has the same value."""

    condition_metric_name = "column_values.not_repeated"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column: Any, **_: Any) -> Any:
        return ~column.duplicated()


class ExpectColumnValuesToNotBeDuplicates(ReasonedRows):
    """Expect few rows to repeat an earlier one: of ten rows that are all the same, nine do.

        batch.validate(ExpectColumnValuesToNotBeDuplicates(column="text"))
        batch.validate(ExpectColumnValuesToNotBeDuplicates(column="doc_id", mostly=0.99))

    Args:
        column: of texts or of their hashes.
        mostly: one minus the duplicate rate that is allowed.
    """

    map_metric = "column_values.not_repeated"

    def sentence(self) -> str:
        """Return what is demanded."""
        return _at_most(self.mostly, "repeat an earlier one.")

    def reason(self, value: Any) -> str:
        """Return why a row that does not hold is bad."""
        return "the same as an earlier row"


class ValuesNotNearlyRepeated(ColumnMapMetricProvider):
    """Whether no earlier text is nearly the same, by MinHash."""

    condition_metric_name = "column_values.not_nearly_repeated"
    condition_value_keys = ("ngram", "permutations", "jaccard")

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(
        cls, column: Any, ngram: int, permutations: int, jaccard: float, **_: Any
    ) -> npt.NDArray[np.bool_]:
        return ~near_duplicates(column.tolist(), ngram, permutations, jaccard)


class ExpectColumnValuesToNotBeNearDuplicates(ReasonedRows):
    """Expect few texts to be nearly the same as an earlier one, by MinHash (Broder 1997).

        batch.validate(
            ExpectColumnValuesToNotBeNearDuplicates(column="text", jaccard=0.8, mostly=0.95)
        )

    All rows are compared, through locality-sensitive hashing: some 10 MB of text a second. Of a
    corpus too large for that, choose documents by `pipelines.validation.frames.content_draws`,
    which takes or leaves near-duplicates together; of rows chosen at random most would lack their
    partner.

    Args:
        column: of texts.
        ngram: words a shingle.
        permutations: values a signature; more estimate the similarity better.
        jaccard: the part of two texts' shingles that is common, from which they are the same.
        mostly: one minus the near-duplicate rate that is allowed.
    """

    ngram: int = 5
    permutations: int = 128
    jaccard: float = 0.8

    map_metric = "column_values.not_nearly_repeated"
    success_keys = ("ngram", "permutations", "jaccard", "mostly")

    def sentence(self) -> str:
        """Return what is demanded."""
        return _at_most(
            self.mostly,
            f"be nearly the same as an earlier one: {percent(self.jaccard)} of the "
            f"{self.ngram}-word shingles in common.",
        )

    def reason(self, value: Any) -> str:
        """Return why a row that does not hold is bad."""
        return "nearly the same as an earlier row"


def near_duplicates(
    texts: list[str], ngram: int, permutations: int, jaccard: float
) -> npt.NDArray[np.bool_]:
    """Return which texts are nearly the same as an earlier one, bool [texts].

    In each band a text is compared with the one before it and the first one of the same key.
    """
    found = np.zeros(len(texts), np.bool_)
    if not texts:
        return found
    signatures = Signer(ngram, permutations).sign(texts)
    small = sketches(signatures)
    for keys in band_keys(signatures, *bands(permutations, jaccard)).T:
        order = np.argsort(keys, kind="stable")
        new = np.concatenate([[True], keys[order][1:] != keys[order][:-1]])
        first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        for earlier in (first, np.roll(order, 1)):
            rows, partners = order[~new], earlier[~new]
            found[rows] |= similar(small[rows], small[partners], jaccard)
    return found


def _at_most(mostly: float, what: str) -> str:
    share = "no row" if mostly >= 1 else f"at most {percent(1 - mostly)} of the rows"
    return f"{share} may {what}"

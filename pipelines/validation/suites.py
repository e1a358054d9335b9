"""What must hold of a dataset before a model is trained on it, as Great Expectations suites.

Each function belongs to the frame of the same name in `frames.py`.
"""

from typing import TYPE_CHECKING

from pipelines.core.recipe import Validation
from pipelines.data.splitting import SPLITS

if TYPE_CHECKING:
    from great_expectations.expectations import Expectation


def documents_suite(demands: Validation) -> "list[Expectation]":
    """Enough documents, none empty, each once: in one split and not in the other."""
    from great_expectations import expectations as gxe

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=demands.min_documents),
        gxe.ExpectColumnDistinctValuesToEqualSet(column="split", value_set=list(SPLITS)),
        gxe.ExpectColumnValuesToNotBeNull(column="characters"),  # null where the text is
        gxe.ExpectColumnValuesToBeBetween(
            column="characters",
            min_value=demands.min_characters,
            max_value=demands.max_characters,
        ),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="text_bytes"),
        gxe.ExpectColumnValuesToNotBeNull(column="doc_id"),
        # With ids that are hashes of the text, unique over both splits means: no duplicates are
        # left, and the splits are disjoint.
        gxe.ExpectColumnValuesToBeNull(column="mistaken_id"),
        gxe.ExpectColumnValuesToBeUnique(column="doc_id"),
    ]


def shards_suite(vocab_size: int) -> "list[Expectation]":
    """Files as large as recorded, an index that fits its tokens, ids that the model knows."""
    from great_expectations import expectations as gxe

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=2),
        gxe.ExpectColumnValuesToNotBeNull(column="bytes"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="recorded_bytes"),
        gxe.ExpectColumnValuesToBeNull(column="broken"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="tokens", column_B="recorded_tokens"),
        gxe.ExpectColumnValuesToBeBetween(column="shortest_document", min_value=1),
        gxe.ExpectColumnValuesToBeBetween(column="smallest_id", min_value=0),
        gxe.ExpectColumnValuesToBeBetween(column="largest_id", max_value=vocab_size - 1),
    ]


def splits_suite() -> "list[Expectation]":
    """The sums of a split agree: its record, the statistics, its documents and its shards."""
    from great_expectations import expectations as gxe

    return [
        gxe.ExpectColumnPairValuesToBeEqual(column_A="documents", column_B="recorded_documents"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="indexed_documents", column_B="documents"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="recorded_bytes"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="tokens", column_B="recorded_tokens"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="documents", column_B="stated_documents"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="stated_bytes"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="tokens", column_B="stated_tokens"),
    ]

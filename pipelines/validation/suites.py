"""What must hold of a dataset before a model is trained on it, as Great Expectations suites.

Each function belongs to the frame of the same name in `frames.py`. What does not apply is left
out: personal data where the recipe does nothing about them, contamination where it names no
evaluation sets, conversations in plain text, drift where there is no earlier version.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core import extensions
from pipelines.data.cleaning.decontaminate import set_files
from pipelines.recipe.recipe import Recipe, Validation

if TYPE_CHECKING:
    from great_expectations.expectations import Expectation


def documents_suite(demands: Validation) -> "list[Expectation]":
    """Expect that no document is empty, and that each is there once, in one split only."""
    from great_expectations import expectations as gxe

    from pipelines.validation.expectations.duplicates import ExpectColumnValuesToNotBeDuplicates

    return [
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
        ExpectColumnValuesToNotBeDuplicates(column="doc_id"),
    ]


def pairs_suite(demands: Validation, *, labelled: bool) -> "list[Expectation]":
    """Expect that a preference can be learnt from each pair, and one that is not of length alone.

    A model that learns from pairs whose chosen answer is nearly always longer learns to say more.
    Labelled answers stand by themselves, some of them good and some not.
    """
    from great_expectations import expectations as gxe

    least, most = demands.chosen_longer
    is_pair = gxe.ExpectColumnValuesToBeNull(column="pair_fault")  # such as of equal answers
    are_single = [
        gxe.ExpectColumnValuesToNotBeNull(column="single"),
        gxe.ExpectColumnUniqueValueCountToBeBetween(column="single", min_value=2),  # good and bad
    ]
    return [
        *(are_single if labelled else [is_pair]),
        gxe.ExpectColumnValuesToBeBetween(column="chosen_characters", min_value=1),
        gxe.ExpectColumnValuesToBeBetween(column="rejected_characters", min_value=1),
        gxe.ExpectColumnMeanToBeBetween(column="chosen_longer", min_value=least, max_value=most),
    ]


def texts_suite(recipe: Recipe, preprocess: Path) -> "list[Expectation]":
    """Return what may be in the texts of the sample, and how the tokenizer fares with them."""
    tokenizer = str(preprocess / "tokenizer")
    return [
        *_fertility(recipe.validation, tokenizer),
        *_content(recipe, preprocess),
        *_conversations(recipe, tokenizer),
        *_extensions(recipe.validation),
    ]


def _fertility(demands: Validation, tokenizer: str) -> "Iterator[Expectation]":
    from pipelines.validation.expectations import tokens

    for expectation, (least, most) in (
        (tokens.ExpectColumnTokensPerWordToBeBetween, demands.tokens_per_word),
        (tokens.ExpectColumnBytesPerTokenToBeBetween, demands.bytes_per_token),
    ):
        yield expectation(column="text", tokenizer=tokenizer, min_value=least, max_value=most)


def _content(recipe: Recipe, preprocess: Path) -> "Iterator[Expectation]":
    from pipelines.validation.expectations import contamination, duplicates, languages
    from pipelines.validation.expectations.personal_data import ExpectColumnValuesToHoldNoPii

    data, demands = recipe.data, recipe.validation
    yield duplicates.ExpectColumnValuesToNotBeNearDuplicates(
        column="text",
        ngram=data.dedup.ngram,
        permutations=data.dedup.permutations,
        jaccard=data.dedup.jaccard,
        mostly=1 - _max_near_duplicates(recipe),
    )
    if demands.languages:
        yield languages.ExpectColumnLanguageMixToBeWithin(column="text", bounds=demands.languages)
    for name, path in set_files(preprocess).items():
        yield contamination.ExpectColumnValuesToNotHoldEvaluationText(
            column="text",
            ngrams=str(path),
            name=name,
            min_shared=data.decontamination.min_shared,
            mostly=1 - demands.max_contaminated,
        )
    if data.pii.action in ("mask", "drop"):
        yield ExpectColumnValuesToHoldNoPii(
            column="text",
            kinds=data.pii.kinds,
            phone_region=data.pii.phone_region,
            mostly=1 - demands.max_pii,
        )


def _conversations(recipe: Recipe, tokenizer: str) -> "Iterator[Expectation]":
    from pipelines.validation.expectations import conversations

    instruction = recipe.data.instruction
    columns = ["messages"] * instruction.is_chat + ["rejected"] * instruction.is_preference
    for column in columns:
        yield conversations.ExpectColumnValuesToBeWellFormedConversations(
            column=column,
            tokenizer=tokenizer,
            mostly=1 - recipe.validation.max_malformed_conversations,
        )


def _extensions(demands: Validation) -> "Iterator[Expectation]":
    """Yield the expectations of a team's own packages; their settings are their arguments."""
    for each in demands.extensions:
        expectation = extensions.load("expectations", each.name)
        yield extensions.call("expectations", each.name, expectation, **each.settings)


def _max_near_duplicates(recipe: Recipe) -> float:
    if (given := recipe.validation.max_near_duplicates) is not None:
        return given
    return 0.02 if recipe.data.dedup.kind == "minhash" else 0.2


def mixture_suite() -> "list[Expectation]":
    """Expect that no dataset's held-out document is in the training text of another."""
    from pipelines.validation.expectations.duplicates import ExpectColumnValuesToNotBeDuplicates

    return [ExpectColumnValuesToNotBeDuplicates(column="doc_id")]


def lengths_suite(demands: Validation, previous: list[int]) -> "list[Expectation]":
    """Return documents as long as those of the previous version, whose histogram this is."""
    from pipelines.validation.expectations.tokens import ExpectColumnLengthDriftToBeAtMost

    return [
        ExpectColumnLengthDriftToBeAtMost(
            column="tokens", reference=previous, max_value=demands.max_length_drift
        )
    ]


def shards_suite(vocab_size: int) -> "list[Expectation]":
    """Return a shard of each split at least, each whole."""
    from great_expectations import expectations as gxe

    from pipelines.validation.expectations.shards import ExpectTokenShardsToBeIntact

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=2),
        ExpectTokenShardsToBeIntact(vocab_size=vocab_size),
    ]


def splits_suite(demands: Validation, *, packed: bool) -> "list[Expectation]":
    """Enough documents, some in each split; its record, statistics, files and shards agree.

    A document of a packed shard's index is a sample, of which there may be any number.
    """
    from great_expectations import expectations as gxe

    indexed = gxe.ExpectColumnPairValuesToBeEqual(
        column_A="indexed_documents", column_B="documents"
    )
    return [
        gxe.ExpectColumnSumToBeBetween(column="documents", min_value=demands.min_documents),
        gxe.ExpectColumnValuesToBeBetween(column="documents", min_value=1),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="documents", column_B="recorded_documents"),
        *([] if packed else [indexed]),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="recorded_bytes"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="tokens", column_B="recorded_tokens"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="documents", column_B="stated_documents"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="bytes", column_B="stated_bytes"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="tokens", column_B="stated_tokens"),
    ]

"""Each expectation by itself, as a user of Great Expectations has it: a frame and a suite."""

import textwrap

import numpy as np
import pandas as pd
import pytest
from great_expectations.expectations.expectation import (
    BatchExpectation,
    ColumnAggregateExpectation,
    ColumnMapExpectation,
)

from pipelines.core.storage import md5
from pipelines.data.cleaning.decontaminate import EvaluationNgrams
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.token_shards import ShardWriter, length_histogram
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer, train_bpe
from pipelines.recipe.data_section import Instruction
from pipelines.validation import expectations
from pipelines.validation.expectations.contamination import (
    ExpectColumnValuesToNotHoldEvaluationText,
)
from pipelines.validation.expectations.conversations import (
    ExpectColumnValuesToBeWellFormedConversations,
)
from pipelines.validation.expectations.duplicates import (
    ExpectColumnValuesToNotBeDuplicates,
    ExpectColumnValuesToNotBeNearDuplicates,
)
from pipelines.validation.expectations.languages import ExpectColumnLanguageMixToBeWithin
from pipelines.validation.expectations.personal_data import ExpectColumnValuesToHoldNoPii
from pipelines.validation.expectations.shards import ExpectTokenShardsToBeIntact
from pipelines.validation.expectations.tokens import (
    ExpectColumnBytesPerTokenToBeBetween,
    ExpectColumnLengthDriftToBeAtMost,
    ExpectColumnTokensPerWordToBeBetween,
    stability_index,
)

ENGLISH = "The committee met on Tuesday and agreed that the bridge should be repaired this year."
GERMAN = "Der Ausschuss tagte am Dienstag und beschloss, dass die Brücke repariert werden soll."


def texts(*values):
    return pd.DataFrame({"text": list(values)})


def long_text(seed, words=300):
    numbers = np.random.default_rng(seed).integers(0, 5000, words)
    return " ".join(f"word{number}" for number in numbers)


# Duplicates


def test_of_equal_rows_all_but_the_first_are_duplicates(held):
    frame = texts("a", "b", "a", "a")
    result = held(frame, ExpectColumnValuesToNotBeDuplicates(column="text"))
    assert not result.success
    assert result.result["unexpected_count"] == 2
    assert held(frame, ExpectColumnValuesToNotBeDuplicates(column="text", mostly=0.5)).success


def test_near_duplicates_are_found_and_others_are_not(held):
    originals = [long_text(seed) for seed in range(40)]
    changed = [text.replace(" ", " extra ", 1) for text in originals[:10]]
    result = held(
        texts(*originals, *changed), ExpectColumnValuesToNotBeNearDuplicates(column="text")
    )
    assert not result.success
    assert result.result["unexpected_count"] == 10
    assert held(texts(*originals), ExpectColumnValuesToNotBeNearDuplicates(column="text")).success


def test_the_allowed_rate_of_near_duplicates_is_inclusive(held):
    frame = texts(*[long_text(seed) for seed in range(9)], long_text(0) + " more")
    allow = ExpectColumnValuesToNotBeNearDuplicates
    assert held(frame, allow(column="text", mostly=0.9)).success
    assert not held(frame, allow(column="text", mostly=0.91)).success


# Languages


def test_the_mix_of_languages_is_bounded_on_both_sides(held):
    frame = texts(ENGLISH, ENGLISH, ENGLISH, GERMAN)
    mix = ExpectColumnLanguageMixToBeWithin
    result = held(frame, mix(column="text", bounds={"en": (0.5, 0.8), "de": (0.2, 0.3)}))
    assert result.success
    assert result.result["observed_value"] == {"en": 0.75, "de": 0.25}
    assert not held(frame, mix(column="text", bounds={"en": (0.8, 1)})).success
    assert not held(frame, mix(column="text", bounds={"de": (0, 0.2)})).success
    assert not held(frame, mix(column="text", bounds={"fr": (0.1, 1)})).success


# Tokenizer


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_tokenizer(), folder)
    return str(folder)


def test_fertility_is_tokens_a_word_without_the_end_of_document(held, byte_folder):
    frame = texts("four six", "été")
    expectation = ExpectColumnTokensPerWordToBeBetween(
        column="text", tokenizer=byte_folder, min_value=4, max_value=5
    )
    result = held(frame, expectation)
    assert result.result["observed_value"] == pytest.approx((8 + 5) / 3)
    assert result.success
    expectation.max_value = 4.2
    assert not held(frame, expectation).success


def test_in_a_script_without_spaces_a_character_is_a_word(held, byte_folder):
    expectation = ExpectColumnTokensPerWordToBeBetween(
        column="text", tokenizer=byte_folder, max_value=3
    )
    result = held(texts("東京に行く"), expectation)
    assert result.result["observed_value"] == 3


def test_bytes_a_token_tell_a_vocabulary_that_fits_from_one_that_does_not(held, tmp_path):
    save_tokenizer(train_bpe([ENGLISH] * 50, 300), tmp_path)
    expectation = ExpectColumnBytesPerTokenToBeBetween(
        column="text", tokenizer=str(tmp_path), min_value=1.5
    )
    assert held(texts(ENGLISH), expectation).success
    assert not held(texts("Комитет собрался во вторник"), expectation).success


# Drift


def lengths(mean, count, seed):
    return np.random.default_rng(seed).lognormal(mean, 1, count).astype(int) + 1


@pytest.mark.parametrize("count", [25, 300, 20_000])
def test_chance_goes_beyond_what_it_is_allowed_once_in_a_thousand(count):
    reference = length_histogram(lengths(6, 20_000, 999))
    drifts = [
        stability_index(reference, length_histogram(lengths(6, count, seed))) for seed in range(500)
    ]
    assert sum(index > chance for index, chance in drifts) <= 5


def test_longer_documents_are_drift(held):
    reference = length_histogram(lengths(6, 3000, 1))
    expectation = ExpectColumnLengthDriftToBeAtMost(column="tokens", reference=reference)
    assert held(pd.DataFrame({"tokens": lengths(6.2, 3000, 2)}), expectation).success
    result = held(pd.DataFrame({"tokens": lengths(7, 3000, 2)}), expectation)
    assert not result.success
    assert result.result["observed_value"] > 0.25


def test_the_index_is_the_formula_of_the_books():
    index, _ = stability_index([300_000, 700_000], [500_000, 500_000])
    assert index == pytest.approx(0.2 * np.log(5 / 3) - 0.2 * np.log(5 / 7), rel=1e-4)
    assert stability_index([5], [])[0] == np.inf
    assert stability_index([5], [5]) == (0, 0)  # one bin tells nothing


# Shards


def shards(folder, *documents, **columns):
    writer = ShardWriter(folder / "train-00000", vocab_size=300)
    for ids in documents:
        writer.add(np.array(ids, np.uint16))
    shard = writer.close()
    row = shard.model_dump(include={"md5", "index_md5", "tokens"})
    return pd.DataFrame([{"path": str(folder / shard.path)} | row | columns])


def fault(held, frame, vocab_size=300):
    result = held(frame, ExpectTokenShardsToBeIntact(vocab_size=vocab_size))
    faults = result.result["observed_value"]
    assert result.success is (not faults)
    return faults.get("train-00000.bin")


def test_an_intact_shard_passes(held, tmp_path):
    assert fault(held, shards(tmp_path, [1, 2, 299], [4])) is None


def test_a_flipped_byte_a_missing_file_and_a_wrong_count_are_named(held, tmp_path):
    frame = shards(tmp_path, [1, 2, 3], [4])
    path = tmp_path / "train-00000.bin"
    assert fault(held, frame.assign(tokens=5)) == ("its index counts 4 tokens, but 5 are recorded")
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    assert fault(held, frame).startswith("train-00000.bin has the md5 ")
    path.unlink()
    assert fault(held, frame) == "train-00000.bin is missing"
    assert fault(held, frame.assign(md5=None)) is None  # it lies elsewhere: the index only
    path.with_suffix(".idx").write_bytes(b"no index")
    assert "train-00000.idx has the md5" in fault(held, frame.assign(md5=None))


def test_ids_and_documents_are_held_against_the_vocabulary_and_the_index(held, tmp_path):
    frame = shards(tmp_path, [1, 2], [7, 4])
    assert fault(held, frame, vocab_size=7) == "token 2 is 7, outside 0 to 6"
    assert fault(held, shards(tmp_path, [1], [], [2])) == "document 1 is empty"


def test_an_index_that_contradicts_itself_is_found(held, tmp_path):
    shards(tmp_path, [1, 2], [3], [4])
    path = tmp_path / "train-00000.idx"
    raw = bytearray(path.read_bytes())
    pointers = 34 + 3 * 4
    raw[pointers + 8 : pointers + 16] = (2).to_bytes(8, "little")  # the second begins at 4
    path.write_bytes(raw)
    frame = shards_row(tmp_path, tokens=4)
    assert fault(held, frame) == "the sizes and the pointers of its index disagree"
    path.write_bytes(raw[:40])
    assert fault(held, shards_row(tmp_path, tokens=4)) is not None


def shards_row(folder, tokens):
    path = folder / "train-00000.bin"
    files = {"md5": md5(path), "index_md5": md5(path.with_suffix(".idx"))}
    return pd.DataFrame([{"path": str(path), "tokens": tokens, **files}])


def test_a_loss_mask_is_a_bit_for_each_token(held, tmp_path):
    mask = tmp_path / "train-00000.mask"
    for content, said in ((b"\0\1\1", None), (b"\0\1", "has 2 bytes for 3 tokens"), (b"\0\1\2", 2)):
        mask.write_bytes(content)
        found = fault(held, shards(tmp_path, [1, 2], [3], mask_md5=md5(mask)))
        assert found is None if said is None else str(said) in found


# Personal data, evaluation sets, conversations


def test_personal_data_are_named_by_kind_and_not_shown(held):
    frame = texts("nothing here", "mail jane.roe@acme-corp.com or bob@acme-corp.com", ENGLISH)
    expectation = ExpectColumnValuesToHoldNoPii(column="text")
    result = held(frame, expectation)
    assert not result.success
    assert result.result["unexpected_count"] == 1
    assert expectation.reason(frame["text"][1]) == "holds 2 email"
    assert held(frame, ExpectColumnValuesToHoldNoPii(column="text", mostly=0.6)).success
    assert held(frame, ExpectColumnValuesToHoldNoPii(column="text", kinds=("card",))).success


def test_text_of_an_evaluation_set_is_found(held, tmp_path):
    exam = " ".join(f"question{number}" for number in range(20))
    path = tmp_path / "exam.npy"
    EvaluationNgrams.build([exam], n=13).save(path)
    frame = texts(ENGLISH, f"An exam: {exam}!")
    expect = ExpectColumnValuesToNotHoldEvaluationText
    expectation = expect(column="text", ngrams=str(path), name="the exam")
    assert not held(frame, expectation).success
    assert expectation.reason(frame["text"][1]) == "shares 8 13-grams with the exam"
    assert held(frame, expect(column="text", ngrams=str(path), min_shared=9)).success


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(byte_tokenizer(), folder)
    make_chat_tokenizer(folder, Instruction())
    return str(folder)


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        ([("user", "2+2?"), ("assistant", "4")], None),
        ([{"role": "system", "content": "Be kind."}, *[{"role": "user", "content": "a"}]], "no tu"),
        ('[["system", "s"], ["user", "a"], ["assistant", "b"], ["user", "c"]]', None),
        ('[["user", "a"], ["user", "b"], ["assistant", "c"]]', "do not take turns"),
        ('[["assistant", "b"]]', "do not take turns"),
        ("[]", "no turn of the assistant"),
        ("not json", "no list of turns"),
        ('[{"role": "user"}]', "no list of turns"),
        ([("user", "a", "b")], "no list of turns"),
    ],
)
def test_conversations_take_turns_and_leave_something_to_predict(
    held, chat_folder, conversation, said
):
    frame = pd.DataFrame({"messages": [conversation, None]})
    expectation = ExpectColumnValuesToBeWellFormedConversations(
        column="messages", tokenizer=chat_folder
    )
    assert held(frame, expectation).success is (said is None)
    reason = expectation.reason(conversation)
    assert reason is None if said is None else said in reason


# All of them


def test_the_packages_example_runs():
    example = expectations.__doc__.split("\n\n    ", 1)[1].rsplit("\n\n", 1)[0]
    exec(textwrap.dedent("    " + example), {})


EXAMPLES = [
    ExpectColumnValuesToNotBeDuplicates(column="text", mostly=0.99),
    ExpectColumnValuesToNotBeNearDuplicates(column="text", mostly=0.99),
    ExpectColumnLanguageMixToBeWithin(column="text", bounds={"en": (0.5, 1)}),
    ExpectColumnTokensPerWordToBeBetween(column="text", tokenizer="t", max_value=3),
    ExpectColumnBytesPerTokenToBeBetween(column="text", tokenizer="t", min_value=1, max_value=3),
    ExpectColumnLengthDriftToBeAtMost(column="text", reference=[3, 5]),
    ExpectTokenShardsToBeIntact(vocab_size=300),
    ExpectColumnValuesToHoldNoPii(column="text", mostly=0.999),
    ExpectColumnValuesToBeWellFormedConversations(column="messages", tokenizer="t"),
]


@pytest.mark.parametrize("expectation", EXAMPLES, ids=lambda each: each.expectation_type)
def test_data_docs_show_a_sentence_in_place_of_code(expectation):
    from great_expectations.expectations.registry import get_renderer_impl

    kinds = (ColumnMapExpectation, ColumnAggregateExpectation, BatchExpectation)
    assert isinstance(expectation, kinds)
    configuration = expectation.configuration
    _, render = get_renderer_impl(configuration.type, "renderer.prescriptive")
    (shown,) = render(configuration=configuration)
    sentence = shown.string_template["params"]["sentence"]
    assert sentence == expectation.sentence()
    assert sentence.endswith(".")
    assert "{" not in sentence
    _, render = get_renderer_impl(configuration.type, "atomic.prescriptive.summary")
    atomic = render(configuration=configuration).to_json_dict()["value"]
    assert atomic["params"]["sentence"]["value"] == sentence


@pytest.mark.parametrize("expectation", EXAMPLES, ids=lambda each: each.expectation_type)
def test_a_suite_survives_a_round_trip_through_json(expectation):
    assert expectation.configuration.to_domain_obj() == expectation

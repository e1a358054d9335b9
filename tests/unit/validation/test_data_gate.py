"""The whole gate on small data: every fault is found and named in one line."""

import hashlib
import html
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json, write_json
from pipelines.data import documents
from pipelines.data.cleaning.decontaminate import EVALUATION_SETS, EvaluationNgrams
from pipelines.data.documents import (
    SCHEMA,
    DocumentWriter,
    documents_folder,
    row_groups,
    split_file,
)
from pipelines.data.normalize import document
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.token_shards import LENGTH_HISTOGRAM, ShardWriter
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.recipe import Recipe, Validation
from pipelines.run.records import DatasetRef, PreprocessRecord, Split, ValidateRecord
from pipelines.stages.validate import data_gate
from pipelines.validation import frames
from pipelines.validation.frames import measure_documents

END = 256  # the end-of-document token of a byte vocabulary
TRAIN = [f"document {number}: été" for number in range(20)]
VALIDATION = ["held out", "отложено"]
RECIPE = Recipe(name="small")


def write_split(preprocess, name, texts):
    path = split_file(documents_folder(preprocess), name)
    tokens = preprocess / "tokens"
    for folder in (path.parent, tokens):
        folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(tokens / f"{name}-00000", vocab_size=257)
    with DocumentWriter(path) as documents:
        for number, text in enumerate(texts):
            documents.add(document(f"{number}.txt", text))
            writer.add(np.array([*text.encode(), END], np.uint16))
    shard = writer.close()
    return Split(
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        tokens=shard.tokens,
        shards=(shard.model_copy(update={"path": f"tokens/{shard.path}"}),),
    )


def write_dataset(workspace, train, validation):
    preprocess = workspace / "outputs" / "preprocess"
    save_tokenizer(byte_tokenizer(), preprocess / "tokenizer")
    dataset = DatasetRef(
        vocab_size=257,
        train=write_split(preprocess, "train", train),
        validation=write_split(preprocess, "validation", validation),
    )
    stats = {
        "splits": {
            name: getattr(dataset, name).model_dump(include={"documents", "bytes", "tokens"})
            for name in ("train", "validation")
        }
    }
    write_json(preprocess / "stats.json", stats)
    PreprocessRecord(dataset=dataset, stats=stats).write(workspace)
    return preprocess


@pytest.fixture
def preprocess(tmp_path):
    return write_dataset(tmp_path, TRAIN, VALIDATION)


def fails(workspace, recipe=RECIPE):
    with pytest.raises(UserError) as caught:
        data_gate.run(recipe, workspace)
    message = str(caught.value)
    assert "\n" not in message
    assert f"see {workspace}/outputs/validate/data_docs/index.html" in message
    assert (workspace / "outputs/validate/data_docs/index.html").is_file()
    assert not (workspace / "outputs/validate/record.json").exists()
    return message


def quarantined(workspace):
    path = workspace / "outputs/validate/quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite_documents(preprocess, split, **columns):
    path = split_file(documents_folder(preprocess), split)
    table = pq.read_table(path).to_pydict() | columns
    schema = pa.schema([field.with_nullable(True) for field in SCHEMA])
    pq.write_table(pa.table(table, schema), path)


def test_good_data_passes_and_the_same_data_gives_the_same_bytes(tmp_path, preprocess, capfd):
    record = data_gate.run(RECIPE, tmp_path)
    assert record == ValidateRecord.read(tmp_path)
    assert record.expectations == len(record.results) == 20
    assert record.quarantined == 0
    assert not (tmp_path / "outputs/validate/quarantine.jsonl").exists()
    (fertility,) = (each for each in record.results if "per_word" in each.expectation)
    texts = [*TRAIN, *VALIDATION]
    tokens_per_word = len("".join(texts).encode()) / len(" ".join(texts).split())
    assert fertility.observed == f"observed {tokens_per_word:.4g}"
    first = folder_hash(tmp_path / "outputs/validate")
    data_gate.run(RECIPE, tmp_path)
    assert folder_hash(tmp_path / "outputs/validate") == first
    page = (tmp_path / "outputs/validate" / record.data_docs).read_text()
    assert "20 of 20 expectations hold" in page
    assert "a word must be 0.5 to 20 tokens on average." in page
    for fetched in ("http:", "https:", "<script", "<link", "src="):
        assert fetched not in page
    assert "Calculating Metrics" not in capfd.readouterr().err


def test_a_document_in_both_splits_is_found(tmp_path):
    write_dataset(tmp_path, TRAIN, [*VALIDATION, TRAIN[0]])
    line = fails(tmp_path)
    assert "expect_column_values_to_not_be_duplicates of doc_id" in line
    digest = hashlib.sha256(TRAIN[0].encode()).hexdigest()
    assert f"1 of 23 rows, such as {digest[:12]}: the same as an earlier row" in line
    assert line.endswith(f"; bad documents: {tmp_path}/outputs/validate/quarantine.jsonl")
    row, also_near = quarantined(tmp_path)
    assert row["doc_id"] == also_near["doc_id"] == digest
    assert (row["split"], row["source"]) == ("validation", "2.txt")
    assert row["excerpt"] == TRAIN[0]


def test_a_null_text_is_found(tmp_path, preprocess):
    rewrite_documents(preprocess, "validation", text=[None, "отложено"])
    assert "documents: expect_column_values_to_not_be_null of characters: 1 of 22" in fails(
        tmp_path
    )


def test_a_text_that_is_not_its_hash_is_found(tmp_path, preprocess):
    rewrite_documents(preprocess, "validation", text=["held-out", "отложено"])
    digest = hashlib.sha256(VALIDATION[0].encode()).hexdigest()
    assert f"of mistaken_id: 1 of 22 rows, such as {digest[:12]}: mistaken_id is " in fails(
        tmp_path
    )


def test_no_text_is_kept_beyond_its_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 50)
    preprocess = write_dataset(tmp_path, TRAIN, VALIDATION)
    assert len(row_groups([split_file(documents_folder(preprocess), "train")])) > 1
    frame = measure_documents(preprocess, Validation(sample_documents=5)).frame
    assert "text" not in frame
    assert frame["characters"].tolist() == [len(text) for text in [*TRAIN, *VALIDATION]]
    assert frame["split"].tolist() == ["train"] * len(TRAIN) + ["validation"] * len(VALIDATION)


def test_of_many_documents_a_part_is_held_which_is_the_same_in_every_run(tmp_path, monkeypatch):
    texts = [f"document {number}" for number in range(1000)]
    preprocess = write_dataset(tmp_path, texts, VALIDATION)
    monkeypatch.setattr(frames, "MAX_ROWS", 300)
    demands = Validation(sample_documents=100)
    found = measure_documents(preprocess, demands)
    assert 200 < len(found.frame) < 400
    assert 60 < len(found.sample) < 140
    assert found.total == 1002
    assert found.splits["train"] == (1000, sum(map(len, texts)))
    again = measure_documents(preprocess, demands)
    assert again.sample.equals(found.sample)
    assert again.frame.equals(found.frame)


def test_of_however_many_documents_each_that_is_wrong_by_itself_is_held(tmp_path, monkeypatch):
    texts = [f"document {number}" for number in range(50)]
    preprocess = write_dataset(tmp_path, texts, VALIDATION)
    changed = [None, "another", *texts[2:]]
    rewrite_documents(preprocess, "train", text=changed)
    monkeypatch.setattr(frames, "MAX_ROWS", 0)
    demands = Validation(max_characters=10)
    assert len(measure_documents(preprocess, Validation()).frame) == 2
    long = [text for text in changed if text and len(text) > 10]
    assert len(measure_documents(preprocess, demands).frame) == 2 + len(long)


@pytest.mark.parametrize("count", ["documents", "bytes", "tokens"])
def test_wrong_statistics_are_found(tmp_path, preprocess, count):
    stats = read_json(preprocess / "stats.json")
    stats["splits"]["train"][count] += 1
    write_json(preprocess / "stats.json", stats)
    assert (
        f"splits: expect_column_pair_values_to_be_equal of {count} and stated_{count}: 1 of 2 "
        in (fails(tmp_path))
    )


def test_statistics_without_a_split_are_found(tmp_path, preprocess):
    write_json(preprocess / "stats.json", {})
    assert "of documents and stated_documents: 2 of 2 rows" in fails(tmp_path)


def test_an_empty_split_is_found(tmp_path):
    write_dataset(tmp_path, TRAIN, [])
    line = fails(tmp_path)
    assert "splits: expect_column_values_to_be_between of documents (min_value=1.0): 1 of 2" in line
    assert "such as documents is 0" in line


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ({"min_documents": 23}, "expect_column_sum_to_be_between of documents (min_value=23"),
        ({"min_characters": 10}, "of characters (min_value=10"),
        ({"max_characters": 15}, "max_value=15"),
    ],
)
def test_the_recipes_bounds_are_demanded(tmp_path, preprocess, demand, said):
    recipe = Recipe.model_validate({"name": "small", "validation": demand})
    assert said in fails(tmp_path, recipe)


def test_a_cut_token_file_is_found(tmp_path, preprocess):
    path = preprocess / "tokens" / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    message = fails(tmp_path)
    assert "shards: expect_token_shards_to_be_intact" in message
    assert "observed train-00000.bin: train-00000.bin has the md5" in message


def test_a_missing_index_is_found_and_its_sums_are_unknown(tmp_path, preprocess):
    (preprocess / "tokens" / "train-00000.idx").unlink()
    message = fails(tmp_path)
    assert "train-00000.idx is missing" in message
    assert "(and 3 more)" in message


def test_longer_documents_than_in_the_previous_version_are_found(tmp_path):
    write_dataset(tmp_path, [f"{number} " * 100 for number in range(100)], VALIDATION)
    write_json(tmp_path / "previous.json", {LENGTH_HISTOGRAM: [0, 0, 0, 0, 100]})
    message = fails(tmp_path)
    assert "lengths: expect_column_length_drift_to_be_at_most of tokens" in message


def test_a_version_before_that_lacks_the_histogram_is_not_compared_with(tmp_path, preprocess):
    write_json(tmp_path / "previous.json", {})
    assert {each.check for each in data_gate.run(RECIPE, tmp_path).results} == {
        "documents",
        "texts",
        "shards",
        "splits",
    }


def test_personal_data_are_quarantined_masked_and_named_by_kind(tmp_path):
    write_dataset(tmp_path, [*TRAIN, "write to jane.roe@acme-corp.com today"], VALIDATION)
    recipe = Recipe.model_validate({"name": "small", "data": {"pii": {"action": "mask"}}})
    line = fails(tmp_path, recipe)
    assert "texts: expect_column_values_to_hold_no_pii of text" in line
    assert "1 of 23 rows, such as " in line
    assert ": holds 1 email; see " in line
    (row,) = quarantined(tmp_path)
    assert row["reason"] == "holds 1 email"
    assert row["excerpt"] == "write to <EMAIL> today"
    page = (tmp_path / "outputs/validate/data_docs/index.html").read_text()
    assert "values must hold no personal data" in page
    assert "jane" not in page
    tolerant = recipe.model_copy(
        update={"validation": recipe.validation.model_copy(update={"max_pii": 0.1})}
    )
    assert data_gate.run(tolerant, tmp_path).quarantined == 1


def test_the_quarantine_is_capped_and_shared_among_the_expectations(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.validation.quarantine.MAX_LINES", 6)
    texts = [f"mail {number}@acme-corp.com" for number in range(20)]
    write_dataset(tmp_path, texts, VALIDATION)
    recipe = Recipe.model_validate(
        {
            "name": "small",
            "data": {"pii": {"action": "mask"}},
            "validation": {"min_characters": 100},
        }
    )
    fails(tmp_path, recipe)
    rows = quarantined(tmp_path)
    assert len(rows) == 6
    assert {row["expectation"] for row in rows} == {
        "expect_column_values_to_be_between",
        "expect_column_values_to_hold_no_pii",
    }
    assert rows[0]["reason"] == f"characters is {len(texts[0])}"
    assert rows[0]["excerpt"] == "mail <EMAIL>"


def test_text_of_an_evaluation_set_is_quarantined_with_the_set_it_is_from(tmp_path):
    leaked = " ".join(f"question{number}" for number in range(30))
    preprocess = write_dataset(tmp_path, [*TRAIN, f"before {leaked} behind"], VALIDATION)
    (preprocess / EVALUATION_SETS).mkdir()
    EvaluationNgrams.build([leaked], 13).save(preprocess / EVALUATION_SETS / "exam.jsonl.npy")
    assert "texts: expect_column_values_to_not_hold_evaluation_text of text" in fails(tmp_path)
    (row,) = quarantined(tmp_path)
    assert row["reason"] == "shares 18 13-grams with exam.jsonl"
    page = (tmp_path / "outputs/validate/data_docs/index.html").read_text()
    assert "values must not share 13 words in a row with exam.jsonl." in page
    assert str(tmp_path) not in page


def test_conversations_are_held_against_the_chat_template(tmp_path):
    good = (("user", "2+2?"), ("assistant", "4"))
    bad = (("user", "2+2?"), ("user", "well?"), ("assistant", "4"))
    preprocess = write_dataset(tmp_path, TRAIN[:2], VALIDATION[:1])
    make_chat_tokenizer(preprocess / "tokenizer", Instruction())
    rewrite_documents(
        preprocess, "train", messages=[json.dumps(messages) for messages in (bad, good)]
    )
    data = {"instruction": {"kind": "messages"}}
    recipe = Recipe.model_validate({"name": "small", "data": data})
    line = fails(tmp_path, recipe)
    assert "texts: expect_column_values_to_be_well_formed_conversations of messages" in line
    (row,) = quarantined(tmp_path)
    assert row["reason"] == "has the roles user, user, assistant, which do not take turns"
    assert "<mark>4" in (tmp_path / "outputs/validate/data_docs/index.html").read_text()


def test_data_docs_mark_what_the_model_learns_to_say(tmp_path):
    talk = (
        ("user", "2+2 < 5?"),
        ("assistant", "4"),
        ("user", "anna.lee@corp-mail.net"),
        ("assistant", "Y"),
    )
    preprocess = write_dataset(tmp_path, TRAIN[:1], VALIDATION[:1])
    make_chat_tokenizer(preprocess / "tokenizer", Instruction())
    rewrite_documents(preprocess, "train", messages=[json.dumps(talk)])
    data = {"instruction": {"kind": "messages"}}
    data_gate.run(Recipe.model_validate({"name": "small", "data": data}), tmp_path)
    page = (tmp_path / "outputs/validate/data_docs/index.html").read_text()
    sample = html.unescape(page.partition("<pre>")[2].partition("</pre>")[0])
    assert sample == (
        "<|im_start|>user\n2+2 < 5?<|im_end|>\n<|im_start|>assistant\n<mark>4<|im_end|></mark>\n"
        "<|im_start|>user\n<EMAIL><|im_end|>\n<|im_start|>assistant\n<mark>Y<|im_end|>\n"
        "<|endoftext|></mark>"
    )


def test_a_version_from_before_there_were_pairs_is_checked(tmp_path, preprocess):
    path = split_file(documents_folder(preprocess), "train")
    pq.write_table(pq.read_table(path).drop_columns("rejected"), path)
    data_gate.run(RECIPE, tmp_path)


def write_pairs(workspace, *pairs):
    """Training pairs of answers to a question; the validation pair is a good one."""
    preprocess = write_dataset(workspace, TRAIN[: len(pairs)], VALIDATION[:1])
    make_chat_tokenizer(preprocess / "tokenizer", Instruction())
    before = [("user", "2+2?"), ("assistant", "Which base?"), ("user", "10")]
    for name, found in (("train", pairs), ("validation", [("4", "five")])):
        columns = zip(*found, strict=True)
        messages, rejected = (
            [json.dumps([*before, ("assistant", said)]) for said in column] for column in columns
        )
        rewrite_documents(preprocess, name, messages=messages, rejected=rejected)
    record = PreprocessRecord.read(workspace)
    dataset = record.dataset.model_copy(update={"pairs": True, "packed_length": 255})
    PreprocessRecord(dataset=dataset, stats=record.stats).write(workspace)


def preference(**validation):
    data = {
        "instruction": {"kind": "preference"},
        "packing": "best_fit",
        "document_mask": True,
    }
    sections = {"data": data, "preference": {"kind": "simpo"}, "validation": validation}
    return Recipe.model_validate({"name": "small", **sections})


def test_the_bias_of_pairs_towards_long_answers_is_told_and_bounded(tmp_path):
    write_pairs(tmp_path, ("four", "5"), ("4 it is", "5"), ("4", "five"))
    record = data_gate.run(preference(), tmp_path)
    (found,) = (each for each in record.results if each.columns == ("chosen_longer",))
    assert (found.check, found.observed) == ("pairs", "observed 0.5")
    assert sum(each.check == "pairs" for each in record.results) == 4
    page = (tmp_path / "outputs/validate/data_docs/index.html").read_text()
    assert "<mark>four" in page
    assert "<mark>Which base?" not in page  # what both conversations say is not learnt
    line = fails(tmp_path, preference(chosen_longer=(0.0, 0.4)))
    assert "pairs: expect_column_mean_to_be_between of chosen_longer" in line
    assert "observed 0.5" in line


ANSWERS = {"chosen_characters", "rejected_characters"}


@pytest.mark.parametrize(
    ("pair", "columns", "reason"),
    [
        (("4", "4"), ANSWERS, "the chosen and the rejected answer are equal"),
        (("4", " "), {"rejected_characters"}, "the rejected answer is empty"),
        (("", "5"), {"chosen_characters"}, "the chosen answer is empty"),
    ],
)
def test_pairs_that_teach_no_preference_are_found(tmp_path, pair, columns, reason):
    write_pairs(tmp_path, ("four", "5"), pair)
    line = fails(tmp_path, preference())
    assert "pairs: expect_column_values_to_be_null of pair_fault: 1 of 3 rows" in line
    rows = quarantined(tmp_path)
    assert {row["column"] for row in rows} == {"pair_fault"} | columns
    assert f"pair_fault is {reason}" in {row["reason"] for row in rows}


def write_labelled(workspace, *answers):
    """Single answers to one question, and whether each is good."""
    write_pairs(workspace, *answers)
    preprocess = workspace / "outputs/preprocess"
    for name, found in (("train", answers), ("validation", [("4", True)])):
        asked = [("user", "2+2?")]
        whole = [[*asked, ("assistant", said)] for said, _ in found]
        sides = [
            (one, asked)[:: 1 if good else -1] for one, (_, good) in zip(whole, found, strict=True)
        ]
        messages, rejected = ([json.dumps(each[side]) for each in sides] for side in (0, 1))
        rewrite_documents(preprocess, name, messages=messages, rejected=rejected)
    record = PreprocessRecord.read(workspace)
    dataset = record.dataset.model_copy(update={"labelled": True})
    PreprocessRecord(dataset=dataset, stats=record.stats).write(workspace)


def labelled(**validation):
    recipe = preference(**validation).to_dict()
    recipe["data"]["instruction"] = {"kind": "labelled"}
    changes = {"preference": {"kind": "kto"}, "model": {"init_from": "/x"}}
    return Recipe.model_validate(recipe | changes)


def test_labelled_answers_are_compared_in_length_with_those_of_the_other_label(tmp_path):
    write_labelled(tmp_path, ("four", True), ("it is 5", False), ("3", False))
    record = data_gate.run(labelled(), tmp_path)
    (found,) = (each for each in record.results if each.columns == ("chosen_longer",))
    # "four" is longer than one of two bad answers, "4" than none.
    assert (found.check, found.observed) == ("pairs", "observed 0.25")
    line = fails(tmp_path, labelled(chosen_longer=(0.4, 0.6)))
    assert "pairs: expect_column_mean_to_be_between of chosen_longer" in line


def test_labelled_answers_without_a_bad_one_or_a_text_are_found(tmp_path):
    write_labelled(tmp_path, ("four", True), ("5", True), ("", True))
    line = fails(tmp_path, labelled())
    assert "pairs: expect_column_unique_value_count_to_be_between of single" in line
    assert "observed 1" in line
    assert "chosen_characters" in {row["column"] for row in quarantined(tmp_path)}


def test_pairs_among_labelled_answers_are_found(tmp_path):
    write_pairs(tmp_path, ("four", "5"), ("4", "five"))
    record = PreprocessRecord.read(tmp_path)
    dataset = record.dataset.model_copy(update={"labelled": True})
    PreprocessRecord(dataset=dataset, stats=record.stats).write(tmp_path)
    assert "expect_column_values_to_not_be_null of single: 3 of 3" in fails(tmp_path, labelled())


def test_of_a_streamed_dataset_version_the_indexes_are_checked(tmp_path, preprocess):
    record = PreprocessRecord.read(tmp_path)
    for path in (preprocess / "tokens").glob("*.bin"):
        path.unlink()
    assert "train-00000.bin is missing" in fails(tmp_path)
    streamed = record.dataset.model_copy(update={"remote": "s3://bucket/datasets"})
    record.model_copy(update={"dataset": streamed}).write(tmp_path)
    data_gate.run(RECIPE, tmp_path)
    (preprocess / "tokens/train-00000.idx").write_bytes(b"another")
    assert "train-00000.idx has the md5" in fails(tmp_path)


def test_an_index_whose_header_lies_is_named_and_nothing_else_breaks(tmp_path, preprocess):
    path = preprocess / "tokens/train-00000.idx"
    content = bytearray(path.read_bytes())
    content[24] ^= 0x7F  # of the number of sequences, so that it is astronomical
    path.write_bytes(content)
    assert "train-00000.idx has the md5" in fails(tmp_path)

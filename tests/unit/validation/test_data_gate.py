"""The whole gate on small data: every fault is found and named in one line."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.records import DatasetRef, PreprocessRecord, Shard, Split, ValidateRecord
from pipelines.core.storage import folder_hash, md5, read_json, write_json
from pipelines.data import documents
from pipelines.data.documents import DocumentWriter, documents_path
from pipelines.data.token_shards import ShardWriter
from pipelines.stages import validate
from pipelines.validation.frames import document_frame

END = 256  # the end-of-document token of a byte vocabulary
TRAIN = [f"document {number}: été" for number in range(20)]
VALIDATION = ["held out", "отложено"]
RECIPE = Recipe(name="small")


def write_split(preprocess, name, texts):
    path = documents_path(preprocess, name)
    prefix = preprocess / "tokens" / f"{name}-00000"
    for folder in (path.parent, prefix.parent):
        folder.mkdir(parents=True, exist_ok=True)
    shard = ShardWriter(prefix, vocab_size=257)
    with DocumentWriter(path) as writer:
        for number, text in enumerate(texts):
            encoded = text.encode()
            digest = hashlib.sha256(encoded).hexdigest()
            row = {"doc_id": digest, "source": f"{number}.txt", "text": text}
            writer.add_row(row | {"bytes": len(encoded)})
            shard.add(np.array([*encoded, END], np.uint16))
    shard.close()
    path = prefix.with_suffix(".bin")
    written = Shard(
        path=f"tokens/{path.name}",
        md5=md5(path),
        index_md5=md5(path.with_suffix(".idx")),
        bytes=path.stat().st_size,
        tokens=shard.tokens,
    )
    return Split(
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        tokens=shard.tokens,
        shards=(written,),
    )


def write_dataset(workspace, train, validation):
    preprocess = workspace / "outputs" / "preprocess"
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
        validate.run(recipe, workspace)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(f"see {workspace}/outputs/validate/data_docs/index.html")
    assert (workspace / "outputs/validate/data_docs/index.html").is_file()
    assert not (workspace / "outputs/validate/record.json").exists()
    return message


def rewrite_documents(preprocess, split, **columns):
    path = documents_path(preprocess, split)
    table = pq.read_table(path).to_pydict() | columns
    pq.write_table(pa.table(table), path)


def test_good_data_passes_and_the_same_data_gives_the_same_bytes(tmp_path, preprocess, capfd):
    record = validate.run(RECIPE, tmp_path)
    assert record == ValidateRecord.read(tmp_path)
    assert record.expectations == 23
    first = folder_hash(tmp_path / "outputs/validate")
    validate.run(RECIPE, tmp_path)
    assert folder_hash(tmp_path / "outputs/validate") == first
    page = (tmp_path / "outputs/validate" / record.data_docs).read_text()
    assert "documents" in page
    assert "Calculating Metrics" not in capfd.readouterr().err


def test_a_document_in_both_splits_is_found(tmp_path):
    write_dataset(tmp_path, TRAIN, [*VALIDATION, TRAIN[0]])
    assert "expect_column_values_to_be_unique of doc_id: 2 of 23 rows" in fails(tmp_path)


def test_a_null_text_is_found(tmp_path, preprocess):
    rewrite_documents(preprocess, "validation", text=[None, "отложено"])
    assert "documents: expect_column_values_to_not_be_null of characters: 1 of 22" in fails(
        tmp_path
    )


def test_a_text_that_is_not_its_hash_is_found(tmp_path, preprocess):
    rewrite_documents(preprocess, "validation", text=["held-out", "отложено"])
    digest = hashlib.sha256(VALIDATION[0].encode()).hexdigest()
    assert f"of mistaken_id: 1 of 22 rows, such as {digest}" in fails(tmp_path)


def test_no_text_is_kept_beyond_its_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 50)
    preprocess = write_dataset(tmp_path, TRAIN, VALIDATION)
    assert len(documents.row_groups(documents.documents_path(preprocess, "train"))) > 1
    frame = document_frame(preprocess)
    assert "text" not in frame
    assert frame["characters"].tolist() == [len(text) for text in [*TRAIN, *VALIDATION]]
    assert frame["split"].tolist() == ["train"] * len(TRAIN) + ["validation"] * len(VALIDATION)


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
    assert "expect_column_distinct_values_to_equal_set of split" in fails(tmp_path)


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ({"min_documents": 23}, "expect_table_row_count_to_be_between (min_value=23"),
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
    assert "shards: expect_column_pair_values_to_be_equal of bytes and recorded_bytes" in message
    assert "more)" in message


def test_a_missing_token_file_is_found(tmp_path, preprocess):
    (preprocess / "tokens" / "train-00000.bin").unlink()
    assert "expect_column_values_to_not_be_null of bytes" in fails(tmp_path)


def test_an_id_outside_the_vocabulary_is_found(tmp_path, preprocess):
    path = preprocess / "tokens" / "train-00000.bin"
    ids = np.fromfile(path, np.uint16)
    ids[5] = 300
    ids.tofile(path)
    assert "of largest_id (max_value=256" in fails(tmp_path)

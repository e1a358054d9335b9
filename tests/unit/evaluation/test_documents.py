"""Which documents are measured."""

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data.documents import SCHEMA, documents_folder, split_file
from pipelines.evaluation.held_out_documents import each_once, read_shares


def write(preprocess, ids):
    path = split_file(documents_folder(preprocess), "validation")
    path.parent.mkdir(parents=True)
    columns = {"doc_id": ids, "source": ["s"] * len(ids), "text": ids, "bytes": [10] * len(ids)}
    columns |= {"messages": [None] * len(ids), "rejected": [None] * len(ids)}
    pq.write_table(pa.table(columns, SCHEMA), path)


def test_each_dataset_gives_its_share_and_a_shared_document_counts_once(tmp_path):
    write(tmp_path / "one", ["d", "a", "c", "b"])
    write(tmp_path / "two", ["c", "b"])
    tables = read_shares(tmp_path, "validation", {"one": 30, "two": 0})
    assert tables["one"]["doc_id"].to_pylist() == ["a", "b", "c"]
    assert tables["two"]["doc_id"].to_pylist() == ["b"]  # one at least
    assert each_once(tables.values())["doc_id"].to_pylist() == ["a", "b", "c"]


def test_one_dataset_is_as_it_was_read(tmp_path):
    write(tmp_path, ["b", "a"])
    (table,) = read_shares(tmp_path, "validation", {"": 100}).values()
    assert each_once([table]).equals(table)


def test_versions_from_before_there_were_pairs_are_read_beside_others(tmp_path):
    for folder, ids in (("one", ["b"]), ("two", ["a"])):
        write(tmp_path / folder, ids)
    path = split_file(documents_folder(tmp_path / "one"), "validation")
    pq.write_table(pq.read_table(path).drop_columns("rejected"), path)
    tables = read_shares(tmp_path, "validation", {"one": 100, "two": 100})
    assert each_once(tables.values())["doc_id"].to_pylist() == ["a", "b"]

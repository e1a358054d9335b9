from pathlib import Path

import pyarrow.parquet as pq

from pipelines.data.documents import ROW_GROUP_BYTES, DocumentWriter, move_one, row_groups, sizes
from pipelines.data.normalize import document
from pipelines.data.tokenization import characters, sample_texts


def write(path: Path, texts: list[str]) -> None:
    with DocumentWriter(path) as writer:
        for number, text in enumerate(texts):
            writer.add(document(f"{number}.txt", text))


def test_documents_keep_their_order_over_row_groups(tmp_path: Path) -> None:
    texts = [f"{number} " + "é" * 200_000 for number in range(7)]
    write(tmp_path / "a.parquet", texts)
    groups = row_groups(tmp_path / "a.parquet")
    assert len(groups) == 3
    read = [text for group in groups for text in group.read("text").column(0).to_pylist()]
    assert read == texts
    assert sizes(tmp_path / "a.parquet").tolist() == [len(text.encode()) for text in texts]
    assert sizes(tmp_path / "a.parquet")[:3].sum() >= ROW_GROUP_BYTES


def test_the_columns_are_the_contracts(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["text"])
    assert pq.read_schema(tmp_path / "a.parquet").names == ["doc_id", "source", "text", "bytes"]


def test_an_empty_split_is_a_file_too(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    assert row_groups(tmp_path / "a.parquet") == []
    assert sizes(tmp_path / "a.parquet").tolist() == []


def test_one_document_moves_to_an_empty_split(tmp_path: Path) -> None:
    source, target = tmp_path / "train.parquet", tmp_path / "validation.parquet"
    write(source, ["a", "b", "c"])
    ids = pq.read_table(source).column("doc_id").to_pylist()
    move_one(source, target, smallest=True)
    assert pq.read_table(target).column("doc_id").to_pylist() == [min(ids)]
    assert pq.read_table(source).column("doc_id").to_pylist() == [x for x in ids if x != min(ids)]


def test_a_sample_is_a_share_of_the_documents_and_always_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [f"text {number}" for number in range(2000)])
    groups = row_groups(tmp_path / "a.parquet")
    sample = list(sample_texts(groups, 0.25))
    assert 400 < len(sample) < 600
    assert sample == list(sample_texts(groups, 0.25))
    assert len(list(sample_texts(groups, 1.5))) == 2000
    assert list(sample_texts(groups, 0)) == ["text 0"]


def test_characters(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["abba", "été"])
    (group,) = row_groups(tmp_path / "a.parquet")
    assert characters(group) == frozenset("abét")

from pathlib import Path

import pyarrow.parquet as pq

from pipelines.data.documents import (
    ROW_GROUP_BYTES,
    DocumentWriter,
    load_messages,
    row_groups,
    sizes,
    split_file,
    split_files,
)
from pipelines.data.normalize import conversation, document


def write(path: Path, texts: list[str]) -> None:
    with DocumentWriter(path) as writer:
        for number, text in enumerate(texts):
            writer.add(document(f"{number}.txt", text))


def test_documents_keep_their_order_over_row_groups(tmp_path: Path) -> None:
    texts = [f"{number} " + "é" * 200_000 for number in range(7)]
    write(tmp_path / "a.parquet", texts)
    groups = row_groups([tmp_path / "a.parquet"])
    assert len(groups) == 3
    read = [text for group in groups for text in group.read("text").column(0).to_pylist()]
    assert read == texts
    assert sizes([tmp_path / "a.parquet"]).tolist() == [len(text.encode()) for text in texts]
    assert sizes([tmp_path / "a.parquet"])[:3].sum() >= ROW_GROUP_BYTES


def test_the_columns_are_the_contracts(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["text"])
    assert pq.read_schema(tmp_path / "a.parquet").names == [
        "doc_id",
        "source",
        "text",
        "bytes",
        "messages",
        "rejected",
    ]


def test_an_empty_split_is_a_file_too(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    assert row_groups([tmp_path / "a.parquet"]) == []
    assert sizes([tmp_path / "a.parquet"]).tolist() == []


def test_a_conversation_comes_back_turn_by_turn(tmp_path: Path) -> None:
    messages = (("user", "2 + 2?\n"), ("assistant", "vier, 四"))
    with DocumentWriter(tmp_path / "a.parquet") as writer:
        writer.add(conversation("a.jsonl:1", messages))
        writer.add(document("b.txt", "no conversation"))
    (group,) = row_groups([tmp_path / "a.parquet"])
    first, second = group.read("messages").column(0).to_pylist()
    assert load_messages(first) == messages
    assert load_messages(second) == ()


def test_a_split_is_read_from_all_its_files_in_order(tmp_path: Path) -> None:
    for number in (1, 0):
        write(split_file(tmp_path, "train", number), [f"file {number}"])
    write(split_file(tmp_path, "validation"), [])
    groups = row_groups(split_files(tmp_path, "train"))
    assert [group.read("text").column(0)[0].as_py() for group in groups] == ["file 0", "file 1"]
    assert sizes(split_files(tmp_path, "train")).tolist() == [6, 6]

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading import file_formats
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import BATCH_BYTES, format_of, plan_reads, read_batch
from pipelines.recipe.data_section import Source


def read(path: Path, **fields: Any) -> list[Document]:
    source = Source(kind="files", path=str(path), **fields)
    batches = plan_reads(source, list_inputs(source))
    return [found for batch in batches for found in read_batch(batch, Fields(source.text_field))]


def kept(documents: list[Document]) -> list[tuple[str, str]]:
    return [(found.source, found.text) for found in documents if not found.dropped]


def jsonl(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text"),
        ("a.md.gz", "text"),
        ("a", "text"),
        ("a.jsonl", "jsonl"),
        ("a.JSONL.GZ", "jsonl"),
        ("a.ndjson.zst", "jsonl"),
        ("a.parquet", "parquet"),
    ],
)
def test_the_format_is_in_the_name(name: str, expected: str) -> None:
    assert format_of(Source(kind="files", path="x"), name) == expected
    assert format_of(Source(kind="files", path="x", format="jsonl"), name) == "jsonl"


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)],
)
def test_text_and_jsonl_are_seen_through_compression(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("\ufeffZeile\r\nünf\r\n".encode()))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(jsonl({"text": "eins"}, {"text": "zwei"})))
    assert kept(read(tmp_path)) == [
        (f"a.txt{suffix}", "Zeile\nünf\n"),
        (f"b.jsonl{suffix}:1", "eins"),
        (f"b.jsonl{suffix}:2", "zwei"),
    ]


def test_compressed_parts_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    packed = [zstandard.compress(jsonl({"text": text})) for text in ("one", "two")]
    path.write_bytes(b"".join(packed))
    assert [text for _, text in kept(read(path))] == ["one", "two"]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_cut_off_archive_is_one_line(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("a.txt.gz" if pack is gzip.compress else "a.txt.zst")
    path.write_bytes(pack(bytes(range(256)) * 999)[:-9])
    with pytest.raises(UserError, match=r"a\.txt\.\w+: this \w+ file is incomplete or broken"):
        read(path)


def test_malformed_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n'
        b"{broken\n"
        b"\n"
        b'["text"]\n'
        b'{"body": "x", "id": 1}\n'
        b'{"text": null}\n'
        b'{"text": 7}\n'
        b'{"text": "caf\xe9"}\n'
        b'{"text": "last"}'
    )
    documents = read(path)
    assert kept(documents) == [("a.jsonl:1", "first"), ("a.jsonl:9", "last")]
    problems = {found.source: found.detail for found in documents if found.dropped == "malformed"}
    assert problems["a.jsonl:2"].startswith("not JSON (")
    assert problems["a.jsonl:4"] == "not a JSON object"
    assert problems["a.jsonl:5"] == "no field 'text' among 'body', 'id'"
    assert problems["a.jsonl:6"] == "field 'text' is null"
    assert problems["a.jsonl:7"] == "field 'text' is int"
    assert problems["a.jsonl:8"] == "not UTF-8"


def test_what_one_parser_refuses_and_others_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "not a number", "score": NaN}\n'
        b'{"text": "half a pair", "tag": "\\ud83d"}\n'
        b'{"text": "\\ud83d"}\n'
    )
    documents = read(path)
    assert kept(documents) == [("a.jsonl:1", "not a number"), ("a.jsonl:2", "half a pair")]
    assert documents[2].dropped == "invalid_utf8"


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.data.reading.file_formats.LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl({"text": "one"}, {"text": "x" * 9000}, {"text": "three"}))
    one, two, three = read(path)
    assert (one.text, three.text, three.source) == ("one", "three", "a.jsonl:3")
    assert two.detail == f"this line of {two.bytes} bytes is too long for a record"
    assert two.bytes == len(jsonl({"text": "x" * 9000}))


def test_rows_that_are_long_are_read_few_at_a_time(tmp_path: Path) -> None:
    texts = [str(number) * 100_000 for number in range(100, 190)]
    pq.write_table(pa.table({"text": texts, "id": range(90)}), tmp_path / "a.parquet")
    with file_formats.open_parquet(str(tmp_path / "a.parquet")) as file:
        assert file_formats._batch_rows(file, [0], Fields()) < 40
    assert [text for _, text in kept(read(tmp_path))] == texts


def test_a_large_jsonl_file_is_read_in_parts_with_true_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    texts = [f"{number} " + "x" * (number % 700) for number in range(9000)]
    texts[4000] = "y" * (2 * BATCH_BYTES + 7)  # a line longer than a part
    path.write_bytes(jsonl(*({"text": text} for text in texts)).removesuffix(b"\n"))
    source = Source(kind="files", path=str(path))
    assert len(plan_reads(source, list_inputs(source))) > 2
    assert kept(read(path)) == [
        (f"large.jsonl:{number}", text) for number, text in enumerate(texts, 1)
    ]


def test_parquet_rows_are_numbered_across_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"id": [1, 2, 3, 4, 5], "body": ["a", "b", None, "d", "é"]})
    pq.write_table(table, path, row_group_size=2)
    documents = read(path, text_field="body")
    assert kept(documents) == [
        ("a.parquet:1", "a"),
        ("a.parquet:2", "b"),
        ("a.parquet:4", "d"),
        ("a.parquet:5", "é"),
    ]
    assert [found.source for found in documents if found.dropped] == ["a.parquet:3"]


def test_parquet_without_the_column_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text' among 'body'; set data\.source\.text_f"):
        read(tmp_path)


def test_what_is_not_parquet_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"noise")
    with pytest.raises(UserError, match=r"a\.parquet: not a Parquet file"):
        read(tmp_path)


def test_a_broken_page_of_parquet_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {number * 7919}" for number in range(999)]}), path)
    content = bytearray(path.read_bytes())
    content[300:400] = b"\xff" * 100
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: this Parquet file is incomplete or"):
        read(tmp_path)


def test_files_in_a_folder_are_whole_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n" * 500)
    (tmp_path / "b.txt").write_bytes(b"\x00\x01")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    documents = read(tmp_path)
    assert [found.source for found in documents] == ["a.txt", "b.txt", "c.txt"]
    assert [found.dropped for found in documents] == [None, "binary", "invalid_utf8"]


def test_a_large_text_file_is_cut_and_a_small_one_only_alone(tmp_path: Path) -> None:
    paragraph = "word " * 40 + "\n\n"
    (tmp_path / "book.txt").write_text(paragraph * 2000)
    (tmp_path / "note.txt").write_text(paragraph * 20)
    documents = kept(read(tmp_path))
    assert documents[-1] == ("note.txt", paragraph * 20)
    book = documents[:-1]
    assert "".join(text for _, text in book) == paragraph * 2000
    assert all(len(text) <= 1 << 14 and text.endswith("\n\n") for _, text in book)
    assert book[1][0] == f"book.txt:{book[0][1].count(chr(10)) + 1}"
    note = kept(read(tmp_path / "note.txt"))
    assert "".join(text for _, text in note) == paragraph * 20
    assert len(note) > 20


def test_a_one_line_file_alone_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("".join(f"{number} " for number in range(1000)))
    assert "".join(text for _, text in kept(read(path))) == path.read_text()
    assert len(read(path)) >= 32


def test_the_library_is_read_whole() -> None:
    source = Source(kind="stdlib")
    inputs = [found for found in list_inputs(source) if found.bytes > 1 << 17]
    (batch, *_) = plan_reads(source, inputs[:1])
    assert [found.source for found in read_batch(batch, Fields())] == [inputs[0].path]

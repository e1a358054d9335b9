from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.core.errors import UserError
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.sources import fingerprint, list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.recipe.data_section import Source
from tests.s3_server import s3_bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with s3_bucket("corpus") as store:
        store.put_object(Key="texts/a.txt", Body=b"first text\n")
        store.put_object(Key="texts/deep/b.jsonl", Body=b'{"text": "second text"}\n')
        yield store


def s3(path: str) -> Source:
    return Source(kind="files", path=f"s3://corpus{path}")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ["texts/a.txt", "texts/deep/b.jsonl"]),
        ("/texts", ["a.txt", "deep/b.jsonl"]),
        ("/texts/", ["a.txt", "deep/b.jsonl"]),
        ("/texts/a.txt", ["a.txt"]),
        ("/texts/**/*.jsonl", ["deep/b.jsonl"]),
    ],
)
def test_objects_are_named_from_their_prefix(bucket: Any, path: str, expected: list[str]) -> None:
    assert [found.path for found in list_inputs(s3(path))] == expected


def test_objects_are_read(bucket: Any) -> None:
    source = s3("/texts")
    documents = [
        found
        for batch in plan_reads(source, list_inputs(source))
        for found in read_batch(batch, Fields())
    ]
    assert [(found.source, found.text) for found in documents] == [
        ("a.txt", "first text\n"),
        ("deep/b.jsonl:1", "second text"),
    ]


def test_the_fingerprint_holds_etags_and_follows_a_change(bucket: Any) -> None:
    before = fingerprint(s3("/texts"))
    assert all(entry["etag"] for entry in before["inputs"])
    bucket.put_object(Key="texts/a.txt", Body=b"First text\n")
    assert fingerprint(s3("/texts")) != before


@pytest.mark.parametrize("url", ["s3://corpus/nothing", "s3://no-such-bucket/x", "s3://corpus/*.x"])
def test_nothing_there_is_one_line(bucket: Any, url: str) -> None:
    with pytest.raises(UserError) as raised:
        list_inputs(Source(kind="files", path=url))
    assert url in str(raised.value)

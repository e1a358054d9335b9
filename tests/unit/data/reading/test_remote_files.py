"""Stores that fsspec knows: one in memory, and web servers of several kinds on this machine."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.data.reading import file_formats, remote_files
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.sources import fingerprint, list_inputs, open_input
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.recipe.data_section import Source

TEXTS = [f"{number} " + "x" * (number % 70) for number in range(3000)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)

FIRST = LINES.partition(b"\n")[0] + b"\n"


def files(url: str) -> Source:
    return Source(kind="files", path=url)


def read(source: Source, batch_bytes: int = 20_000) -> list[tuple[str, str]]:
    plan = plan_reads(source, list_inputs(source), batch_bytes)
    documents = (found for batch in plan for found in read_batch(batch, Fields()))
    return [(found.source, found.text) for found in documents]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "RANGE_BYTES", 7000)
    monkeypatch.setattr(remote_files, "_MOST_SECONDS", 0.01)


@pytest.fixture
def store() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/corpus", recursive=True)


def test_a_store_is_listed_and_read_like_a_folder(store: Any) -> None:
    store.pipe_file("/corpus/a.jsonl", LINES)
    store.pipe_file("/corpus/b/c.jsonl.gz", gzip.compress(LINES))
    store.pipe_file("/corpus/b/d.txt", b"some text\n")
    with store.open("/corpus/e.parquet", "wb") as file:
        pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=1000)
    documents = read(files("memory://corpus"))
    assert [text for _, text in documents] == [*TEXTS, *TEXTS, "some text\n", *TEXTS]
    names = [name for name, _ in documents]
    assert names[:2] == ["a.jsonl@0", f"a.jsonl@{len(FIRST)}"]
    assert names[3000] == "b/c.jsonl.gz:1"
    assert names[-1] == "e.parquet:3000"
    assert [found.path for found in list_inputs(files("memory://corpus/**/*.txt"))] == ["b/d.txt"]
    assert [found.path for found in list_inputs(files("memory://corpus/b/d.txt"))] == ["d.txt"]


def test_where_a_store_says_nothing_the_content_is_hashed(store: Any) -> None:
    store.pipe_file("/corpus/a.txt", b"one")
    before = fingerprint(files("memory://corpus"))
    store.pipe_file("/corpus/a.txt", b"one")
    assert fingerprint(files("memory://corpus")) == before
    store.pipe_file("/corpus/a.txt", b"two")
    assert fingerprint(files("memory://corpus")) != before


@pytest.mark.parametrize("size", [1, 100, 7000, 7001, 50_000])
def test_a_range_owns_the_lines_that_begin_in_it(store: Any, size: int) -> None:
    some = LINES[: LINES.index(b"\n", 3000) + 1] if size < 100 else LINES
    store.pipe_file("/corpus/a.jsonl", some)
    texts = [text for _, text in read(files("memory://corpus/a.jsonl"), size)]
    assert texts == TEXTS[: some.count(b"\n")]


def test_a_long_text_is_the_same_in_parts_or_as_a_stream(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "PART_BYTES", 30_000)
    monkeypatch.setattr("pipelines.data.reading.text_readers.PART_BYTES", 30_000)
    monkeypatch.setattr(file_formats, "_WINDOW", 300)
    text = "".join(f"{number} ünï\r\n" + "\r\n" * (number % 9 == 0) for number in range(9000))
    text += "no end of line " * 3000 + "日本語" * 9000
    store.pipe_file("/corpus/a.txt", text.encode())
    store.pipe_file("/corpus/b/a.txt.gz", gzip.compress(text.encode()))
    apart, stream = read(files("memory://corpus/a.txt")), read(files("memory://corpus/b"))
    assert "".join(piece for _, piece in apart) == text.replace("\r\n", "\n")
    assert [piece for _, piece in apart] == [piece for _, piece in stream]
    assert apart[0][0] == "a.txt@0:1"
    source = files("memory://corpus/a.txt")
    assert len(plan_reads(source, list_inputs(source), 20_000)) > 5


class Handler(BaseHTTPRequestHandler):
    """A file server that can be told to misbehave."""

    content: ClassVar[bytes] = LINES
    ranges: ClassVar[bool] = True
    failures: ClassVar[list[str]] = []  # what the next requests for content are answered with

    def do_HEAD(self) -> None:
        self._answer(200, len(self.content))

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        part = self.content
        if asked and self.ranges:
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            part = part[int(start) : int(stop) + 1]
        failure = self.failures.pop() if self.failures else ""
        if failure == "503":
            self._answer(503, 0)
            return
        if self.path != "/a.jsonl":
            self._answer(404, 0)
            return
        if failure == "short":
            part = part[:-9]
        self._answer(206 if asked and self.ranges else 200, len(part))
        self.wfile.write(part[: len(part) // 2] if failure == "torn" else part)

    def _answer(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", '"one"')
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Be silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(Handler, "failures", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_web_servers_file_is_read_by_ranges(server: str) -> None:
    source = files(f"{server}/a.jsonl")
    assert [text for _, text in read(source)] == TEXTS
    assert len(plan_reads(source, list_inputs(source), 20_000)) > 5
    assert fingerprint(source)["inputs"] == [
        {"path": "a.jsonl", "bytes": len(LINES), "etag": "one"}
    ]


def test_a_server_without_ranges_is_read_whole(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "ranges", False)
    source = files(f"{server}/a.jsonl")
    assert [text for _, text in read(source)] == TEXTS
    assert len(plan_reads(source, list_inputs(source), 20_000)) == 1


def test_a_server_without_ranges_is_asked_again(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "ranges", False)
    Handler.failures += ["torn", "503", "503"]
    assert [text for _, text in read(files(f"{server}/a.jsonl"))] == TEXTS
    assert not Handler.failures


@pytest.mark.parametrize("failure", ["503", "short", "torn"])
def test_what_passes_is_tried_again(server: str, failure: str) -> None:
    with open_input(f"{server}/a.jsonl") as file:
        Handler.failures += [failure] * 3
        assert file.read() == LINES
    assert not Handler.failures


@pytest.mark.parametrize("failure", ["503", "short", "torn"])
def test_what_does_not_pass_is_one_line_and_no_text(server: str, failure: str) -> None:
    with open_input(f"{server}/a.jsonl") as file:
        Handler.failures += [failure] * 99
        with pytest.raises(remote_files.RemoteError, match=r"a\.jsonl: cannot be read: "):
            file.read()


def test_a_network_error_is_not_taken_for_a_broken_archive(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe_file("/corpus/a.txt.gz", gzip.compress(LINES, compresslevel=1))

    def fail(*_: Any, **__: Any) -> bytes:
        raise TimeoutError("nobody answers")

    source = files("memory://corpus")
    plan = plan_reads(source, list_inputs(source))
    monkeypatch.setattr(type(store), "cat_file", fail)
    with pytest.raises(remote_files.RemoteError, match="nobody answers"):
        list(read_batch(plan[0], Fields()))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://corpus/none", "no file lies there|cannot be listed"),
        ("nosuch://bucket/x", "fsspec cannot open it"),
        ("memory://corpus/*.x", "no file lies there"),
    ],
)
def test_nothing_there_is_one_line(url: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        list_inputs(files(url))
    assert url in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_url_is_a_local_path(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    by_url, by_path = files(f"file://{tmp_path}"), files(str(tmp_path))
    assert fingerprint(by_url) == fingerprint(by_path)

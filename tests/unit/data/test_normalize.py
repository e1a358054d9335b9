import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.normalize import Document, cut, decode, document, normalize


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("\ufeffwith a mark", "with a mark"),
        ("e\u0301te\u0301", "\u00e9t\u00e9"),
        ("  leading and trailing  ", "  leading and trailing  "),
        ("日本語 😀", "日本語 😀"),
    ],
)
def test_normalize(raw: str, expected: str) -> None:
    assert normalize(raw) == expected


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


def test_a_document_is_known_by_the_hash_of_its_normalised_text() -> None:
    found = document("a.txt", "é\r\n")
    assert found.doc_id == hashlib.sha256("é\n".encode()).hexdigest()
    assert found.bytes == 3
    assert found.doc_id == document("b.txt", "e\u0301\n").doc_id


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t\n", "empty"),
        ("\ufeff", "empty"),
        ("nul \0 inside", "binary"),
        ("lone \ud800 surrogate", "invalid_utf8"),
    ],
)
def test_a_dropped_document_has_a_reason(text: str, reason: str) -> None:
    assert document("x", text).dropped == reason


@pytest.mark.parametrize(("raw", "reason"), [(b"\x00\xff", "binary"), (b"caf\xe9", "invalid_utf8")])
def test_bytes_that_are_no_text_are_dropped(raw: bytes, reason: str) -> None:
    found = decode("x", raw)
    assert isinstance(found, Document)
    assert (found.dropped, found.bytes) == (reason, len(raw))


@given(st.text(alphabet=st.sampled_from("ab \n")), st.integers(1, 20))
def test_pieces_join_to_the_text_and_keep_the_limit(text: str, limit: int) -> None:
    pieces = list(cut(text, limit))
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)


def test_pieces_end_at_blank_lines_then_lines_then_spaces_then_anywhere() -> None:
    assert list(cut("one\n\ntwo\n\nthree\n\nfour", 12)) == ["one\n\ntwo\n\n", "three\n\nfour"]
    assert list(cut("one\ntwo\nthree", 9)) == ["one\ntwo\n", "three"]
    assert list(cut("one two three", 9)) == ["one two ", "three"]
    assert list(cut("abcdefgh", 3)) == ["abc", "def", "gh"]

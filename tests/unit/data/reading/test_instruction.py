import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.recipe.data_section import Data, Instruction, Source

MESSAGES = Fields(instruction=Instruction(kind="messages"))
PAIRS = Fields(
    instruction=Instruction(
        kind="prompt_response", prompt_field="question", response_field="answer"
    )
)
TALK = [
    {"role": "system", "content": "Be kind.\r\n"},
    {"role": "user", "content": "Cafe\u0301?"},
    {"role": "assistant", "content": "Yes."},
]


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_a_conversation_is_normalised_turn_by_turn() -> None:
    found = record_document("a:1", 9, {"messages": TALK}, MESSAGES)
    assert found.messages == (
        ("system", "Be kind.\n"),
        ("user", "Caf\u00e9?"),
        ("assistant", "Yes."),
    )
    assert found.text == "Be kind.\n\n\nCaf\u00e9?\n\nYes."
    assert found.bytes == len(found.text.encode())
    assert not found.dropped


def test_a_prompt_and_its_response_are_a_conversation() -> None:
    found = record_document("a:1", 9, {"question": "1 + 1?", "answer": "2", "id": 7}, PAIRS)
    assert found.messages == (("user", "1 + 1?"), ("assistant", "2"))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "x"}, "no field 'messages' among 'text'"),
        ({"messages": "hello"}, "field 'messages' is str, not a list"),
        ({"messages": ["hello"]}, "message 1 is str, not an object"),
        ({"messages": [{"content": "x"}]}, "message 1: 'role' is missing"),
        ({"messages": [{"role": "user"}]}, "message 1: 'content' is missing"),
        (turns(("user", None)), "message 1: 'content' is null, not a string"),
        (turns(("user", [{"type": "text"}])), "message 1: 'content' is list, not a string"),
        (
            turns(("user", "x"), ("tool", "y")),
            "message 2: role 'tool' is none of system, user, assistant",
        ),
        (
            turns(("user", "x"), ("assistant", " \n")),
            "message 2: the assistant's content is empty",
        ),
        (turns(("user", "x")), "no message has the role 'assistant'"),
        (turns(), "no message has the role 'assistant'"),
        (
            turns(("user", "x"), ("system", "y"), ("assistant", "z")),
            "a message with the role 'system' is not the first",
        ),
        (
            turns(("system", "y"), ("assistant", "z")),
            "the first non-system message must have the role 'user'",
        ),
    ],
)
def test_what_is_no_conversation_says_why(record: dict[str, Any], problem: str) -> None:
    found = record_document("a:1", 9, record, MESSAGES)
    assert (found.dropped, found.detail, found.bytes) == ("malformed", problem, 9)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"question": "x"}, "no field 'answer' among 'question'"),
        ({"question": None, "answer": "x"}, "field 'question' is null"),
        ({"question": "x", "answer": ""}, "field 'answer' is empty"),
    ],
)
def test_what_is_no_pair_says_why(record: dict[str, Any], problem: str) -> None:
    assert record_document("a:1", 9, record, PAIRS).detail == problem


@pytest.mark.parametrize(
    ("record", "kind"),
    [({"messages": TALK}, "messages"), ({"prompt": "x", "response": "y"}, "prompt_response")],
)
def test_conversations_read_as_text_name_the_setting(record: dict[str, Any], kind: str) -> None:
    found = record_document("a:1", 9, record, Fields())
    assert found.detail.endswith(f"set data.instruction.kind to {kind}")


def test_binary_content_drops_the_conversation() -> None:
    found = record_document("a:1", 9, turns(("user", "\0"), ("assistant", "x")), MESSAGES)
    assert found.dropped == "binary"
    assert not found.messages


def read(path: Path, fields: Fields) -> list[Document]:
    source = Source(kind="files", path=str(path))
    plan = plan_reads(source, list_inputs(source))
    return [found for batch in plan for found in read_batch(batch, fields)]


def test_jsonl_and_parquet_hold_the_same_conversations(tmp_path: Path) -> None:
    records = [{"messages": TALK, "id": 1}, {"messages": TALK[1:], "id": 2}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    documents = read(tmp_path, MESSAGES)
    assert [found.source for found in documents] == [
        "a.jsonl.gz:1",
        "a.jsonl.gz:2",
        "b.parquet:1",
        "b.parquet:2",
    ]
    assert documents[0].messages == documents[2].messages
    assert documents[1].doc_id == documents[3].doc_id


def test_parquet_of_conversations_read_as_text_names_the_setting(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"messages": TALK}]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"set data\.instruction\.kind to messages"):
        read(tmp_path, Fields())
    with pytest.raises(UserError, match=r"no column 'question' among 'messages'"):
        read(tmp_path, PAIRS)


def test_a_recipe_names_the_fields() -> None:
    data = Data(instruction=PAIRS.instruction, source=Source(text_field="body"))
    assert Fields.of(data) == Fields("body", PAIRS.instruction)
    assert Fields.of(data).columns == ("question", "answer")

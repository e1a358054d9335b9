import gzip
import json
import math
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
PREFERENCE = Fields(instruction=Instruction(kind="preference"))
RATED = Fields(instruction=Instruction(kind="rated"))
LABELLED = Fields(instruction=Instruction(kind="labelled"))
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


def talk(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def said(*contents: str) -> tuple[tuple[str, str], ...]:
    return tuple((turn["role"], turn["content"]) for turn in talk(*contents))


GOOD, BAD = talk("", "yes")[1:], talk("", "no")[1:]


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": talk("a", "b", "c", "yes"), "rejected": talk("a", "b", "c", "no")},
        {
            "prompt": "a text beside whole conversations",
            "chosen": talk("a", "b", "c", "yes"),
            "rejected": talk("a", "b", "c", "no"),
        },
        {"prompt": talk("a", "b", "c"), "chosen": GOOD, "rejected": BAD},
    ],
    ids=["whole conversations", "a prompt beside them", "ends"],
)
def test_a_pair_is_two_conversations_that_begin_alike(record: dict[str, Any]) -> None:
    found = record_document("a:1", 9, record, PREFERENCE)
    assert found.messages == said("a", "b", "c", "yes")
    assert found.rejected == said("a", "b", "c", "no")
    assert found.text == "a\n\nb\n\nc\n\nyes\n\nno"


def test_a_pair_of_texts_answers_one_prompt() -> None:
    found = record_document(
        "a:1", 9, {"prompt": "a\r\n", "chosen": "yes", "rejected": "no"}, PREFERENCE
    )
    assert (found.messages, found.rejected) == (said("a\n", "yes"), said("a\n", "no"))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "x"}, "no field 'chosen' among 'text'"),
        ({"chosen": "x", "rejected": "y"}, "no field 'prompt' among 'chosen', 'rejected'"),
        ({"prompt": "a", "chosen": "x"}, "no field 'rejected' among 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": "x", "rejected": None}, "field 'rejected' is null"),
        ({"prompt": "a", "chosen": " ", "rejected": "y"}, "field 'chosen' is empty"),
        (
            {"prompt": talk("a"), "chosen": "x", "rejected": "y"},
            "field 'chosen' is str, not a list",
        ),
        (
            {"chosen": talk("a", "x"), "rejected": "y"},
            "field 'rejected' is str, not a list",
        ),
        (
            {"prompt": talk("a"), "chosen": GOOD, "rejected": talk("", " ")[1:]},
            "message 1: the assistant's content is empty",
        ),
        (
            {"prompt": "a", "chosen": "caf\u00e9", "rejected": "cafe\u0301"},
            "the chosen and the rejected answer are equal",
        ),
        (
            {"prompt": talk("a", "b"), "chosen": talk("c", "d"), "rejected": []},
            "the rejected answer is empty: the other conversation goes on from it",
        ),
        (
            {"chosen": talk("a", "b"), "rejected": talk("a", "b", "c", "d")},
            "the chosen answer is empty: the other conversation goes on from it",
        ),
        (
            {"chosen": talk("a", "x"), "rejected": talk("b", "y")},
            "the conversations do not begin alike: message 1 of the chosen one differs and is "
            "not the assistant's",
        ),
        (
            {"chosen": talk("a", "b", "c", "x"), "rejected": talk("a", "b", "d", "x")},
            "the conversations do not begin alike: message 3 of the chosen one differs and is "
            "not the assistant's",
        ),
        (
            {"prompt": talk("a"), "chosen": GOOD, "rejected": [*BAD, *talk("c")]},
            "the rejected conversation does not end with a turn of the assistant",
        ),
        (
            {"prompt": talk("a"), "chosen": talk("b"), "rejected": BAD},
            "no message has the role 'assistant'",
        ),
    ],
)
def test_what_is_no_preference_says_why(record: dict[str, Any], problem: str) -> None:
    found = record_document("a:1", 9, record, PREFERENCE)
    assert (found.dropped, found.detail) == ("malformed", problem)


def rated(*answers: tuple[Any, Any]) -> dict[str, Any]:
    found = [{"content": content, "rating": rating, "by": "x"} for content, rating in answers]
    return {"prompt": "a", "answers": found}


def test_of_rated_answers_the_best_and_the_worst_are_a_pair(tmp_path: Path) -> None:
    record = rated(("w", 2), ("x", 4.5), ("y", 1), ("z", 4.5), ("v", 1))
    found = record_document("a:1", 9, record, RATED)
    assert (found.messages, found.rejected) == (said("a", "x"), said("a", "y"))
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "b.parquet")
    assert read(tmp_path, RATED)[0][1:] == (*found[1:],)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (rated(("x", 1)), "field 'answers': no answer is rated higher than another"),
        (rated(("x", 3), ("y", 3.0)), "field 'answers': no answer is rated higher than another"),
        (rated(("x", 3), ("y", None)), "field 'answers' is not a list of {content, rating}"),
        (rated(("x", 3), ("y", math.nan)), "field 'answers' is not a list of {content, rating}"),
        (rated(("x", 10**400), (1, 3)), "field 'answers' is not a list of {content, rating}"),
        (rated(("x", 10**400), ("", 3)), "field 'rejected' is empty"),
        ({"prompt": "a", "answers": "x"}, "field 'answers' is not a list of {content, rating}"),
        ({"prompt": "a"}, "no field 'answers' among 'prompt'"),
    ],
)
def test_answers_without_two_ratings_say_why(record: dict[str, Any], problem: str) -> None:
    found = record_document("a:1", 9, record, RATED)
    assert (found.dropped, found.detail) == ("malformed", problem)


@pytest.mark.parametrize("prompt", ["a", [{"role": "user", "content": "a"}]])
def test_a_labelled_answer_stands_beside_its_prompt_alone(prompt: Any, tmp_path: Path) -> None:
    good = {"prompt": prompt, "response": "x\r\n", "label": True}
    bad = {"prompt": prompt, "response": "x\r\n", "label": False}
    of_good, of_bad = (record_document("a:1", 9, record, LABELLED) for record in (good, bad))
    assert (of_good.messages, of_good.rejected) == (said("a", "x\n"), (("user", "a"),))
    assert (of_bad.messages, of_bad.rejected) == (of_good.rejected, of_good.messages)
    assert (of_good.text, of_good.doc_id) == ("a\n\nx\n", of_bad.doc_id)
    pq.write_table(pa.Table.from_pylist([good, bad]), tmp_path / "b.parquet")
    assert [each[1:] for each in read(tmp_path, LABELLED)] == [of_good[1:], of_bad[1:]]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "response": "x"}, "no field 'label' among 'prompt', 'response'"),
        ({"prompt": "a", "response": "x", "label": "yes"}, "field 'label' is 'yes', not true or"),
        ({"prompt": "a", "response": "x", "label": None}, "field 'label' is None, not true or"),
        ({"prompt": "a", "response": " ", "label": True}, "field 'response' is empty"),
        ({"prompt": [], "response": "x", "label": True}, "the first non-system message must"),
        ({"response": "x", "label": True}, "no field 'prompt' among 'response', 'label'"),
    ],
)
def test_what_is_no_labelled_answer_says_why(record: dict[str, Any], problem: str) -> None:
    found = record_document("a:1", 9, record, LABELLED)
    assert found.dropped == "malformed"
    assert found.detail.startswith(problem)


def test_half_a_pair_is_no_labelled_answer() -> None:
    before = [*talk("a", "b"), {"role": "user", "content": "c"}]
    record = {"chosen": before, "rejected": [*before, {"role": "assistant", "content": "d"}]}
    found = record_document("a:1", 9, record, PREFERENCE)
    assert found.detail == "one of the two answers is missing"


def test_a_table_of_pairs_may_lack_the_prompt(tmp_path: Path) -> None:
    records = [{"chosen": talk("a", "x"), "rejected": talk("a", "y"), "id": 1}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    (found,) = read(tmp_path, PREFERENCE)
    assert (found.messages, found.rejected) == (said("a", "x"), said("a", "y"))
    with pytest.raises(UserError, match=r"set data\.instruction\.kind to preference"):
        read(tmp_path, Fields())
    pq.write_table(pa.Table.from_pylist([{"chosen": "x", "prompt": "a"}]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="no column 'rejected' among 'chosen', 'prompt'"):
        read(tmp_path, PREFERENCE)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": TALK}, "messages"),
        ({"prompt": "x", "response": "y"}, "prompt_response"),
        ({"chosen": "x", "rejected": "y"}, "preference"),
    ],
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

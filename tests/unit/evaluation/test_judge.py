"""Judges of known taste, behind a local server that speaks OpenAI's protocol."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError
from tenacity import wait_none

from pipelines.evaluation import judge as module
from pipelines.evaluation.judge import Pair, judge
from pipelines.recipe.recipe import Judge

PAIRS = [
    Pair("What is 1 + 1?", "Two, of course.", "3"),
    Pair("What is red?", "Red.", "A colour, that of blood."),
    Pair("Say A.", "same", "same"),
]
Reply = Callable[[str, str], str | int]  # of the texts A and B: what is said, or an HTTP status


class Answers(ThreadingHTTPServer):
    reply: Reply
    seen: list[Any]


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        asked = body["messages"][0]["content"]
        first, second = re.findall(r'<text name=".">\n(.*?)\n</text>', asked, re.DOTALL)
        said = self.server.reply(first, second)
        status = said if isinstance(said, int) else 200
        message = {"role": "assistant", "content": said}
        answer = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(reply: Reply) -> Iterator[tuple[Judge, list[Any]]]:
    with Answers(("127.0.0.1", 0), Handler) as server:
        server.reply, server.seen = reply, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Judge(url=f"http://127.0.0.1:{server.server_port}/v1", model="wise"), server.seen
        server.shutdown()


def longer(first: str, second: str) -> str:
    if len(first) == len(second):
        return "Both are the same: TIE"
    return f"I think A is not B.\n{'A' if len(first) > len(second) else 'B'}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "wait_exponential", lambda **_: wait_none())


def test_a_text_is_preferred_if_it_is_so_in_both_orders() -> None:
    with answering(longer) as (by, seen):
        found = judge(PAIRS, by, "a-key")
    assert (found.candidate, found.champion, found.neither, found.changed) == (1, 1, 1, 0)
    assert found.failure is None
    assert found.figures() == {
        "judge/candidate": 1 / 3,
        "judge/champion": 1 / 3,
        "judge/neither": 1 / 3,
        "judge/agreement": 1.0,
    }
    assert {path for path, _, _ in seen} == {"/v1/chat/completions"}
    assert {key for _, key, _ in seen} == {"Bearer a-key"}
    assert len(seen) == 6
    assert all(body["model"] == "wise" and body["temperature"] == 0 for _, _, body in seen)


def test_a_judge_that_likes_the_first_place_prefers_nobody() -> None:
    with answering(lambda *_: "A") as (by, seen):
        found = judge(PAIRS, by, None)
    assert (found.candidate, found.champion, found.neither, found.changed) == (0, 0, 0, 3)
    assert found.figures()["judge/agreement"] == 0
    assert {key for _, key, _ in seen} == {None}
    assert str(found) == (
        "the judge wise preferred the candidate's text for 0 of 3 prompts, the champion's for 0, "
        "and neither for 0; its choice changed with the order for 3"
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_judge_is_asked_again(status: int) -> None:
    left = [status, status]

    def busy(first: str, second: str) -> str | int:
        return left.pop() if left else longer(first, second)

    with answering(busy) as (by, seen):
        assert judge(PAIRS[:1], by, None).candidate == 1
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        ("I like both.", "ValueError: the reply 'I like both.' names neither A, B nor TIE"),
        (401, "HTTPStatusError: Client error '401 Unauthorized' for url"),
        (500, "HTTPStatusError: Server error '500 Internal Server Error' for url"),
    ],
)
def test_a_judge_that_gives_no_judgement_says_why(reply: str | int, line: str) -> None:
    with answering(lambda *_: reply) as (by, _):
        found = judge(PAIRS, by, "a-key")
    assert (found.pairs, found.candidate, found.champion) == (3, 0, 0)
    assert str(found).startswith(f"the judge wise could not compare: {line}")
    assert "\n" not in str(found)
    assert "a-key" not in str(found)
    assert found.figures() == {}


def test_a_judge_that_is_not_there_says_why() -> None:
    found = judge(PAIRS, Judge(url="http://127.0.0.1:9/v1", model="wise"), None)
    assert "ConnectError" in str(found)


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Judge(url="https://ada:secret@host/v1", model="wise")

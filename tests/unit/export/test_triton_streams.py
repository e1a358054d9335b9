"""A model that streams: its thread, with the stand-in's response senders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.export.triton_server import export_triton
from tests.unit.export import triton_stand_in
from tests.unit.export.models import CONTEXT, PROMPTS, small, write_registered
from tests.unit.export.triton_started import greedy, request, start, texts

WAIT_S = 60


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_registered(small(), tmp_path_factory.mktemp("registered"))


@contextmanager
def started(registered: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    version = export_triton(registered, folder, "m", 1, "python-stream")
    model = start(version, monkeypatch)
    yield model
    model.finalize()


@pytest.fixture
def model(registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with started(registered, tmp_path, monkeypatch) as made:
        yield made


def ask(model: Any, *asked: Any) -> list[triton_stand_in.ResponseSender]:
    assert model.execute(list(asked)) is None
    return [each.sender for each in asked]


def answer(sender: triton_stand_in.ResponseSender) -> list[list[str]]:
    """The texts of each response."""
    assert sender.final.wait(WAIT_S)
    return [texts(each) for each in sender.responses]


def error(sender: triton_stand_in.ResponseSender) -> triton_stand_in.TritonError:
    assert sender.final.wait(WAIT_S)
    found = sender.responses[-1].error()
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["llama-100k", "gpt2-124m", "pythia-160m"])
def test_streams_and_whole_answers_join_each_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_registered(small(name), tmp_path / "source")
    most = [3, 12, 7, 9]
    expected = [greedy(source, prompt, n) for prompt, n in zip(PROMPTS, most, strict=True)]
    with started(source, tmp_path / "repository", monkeypatch) as model:
        (whole,) = ask(model, request(PROMPTS, most))
        streams = [
            ask(model, request([prompt], [n], stream=True))[0]
            for prompt, n in zip(PROMPTS * 4, most * 4, strict=True)  # more than there are rows
        ]
        assert answer(whole) == [expected]
        said = [[piece for (piece,) in answer(each)] for each in streams]
    assert ["".join(each) for each in said] == expected * 4
    assert all(all(each) or each == [""] for each in said)
    assert max(map(len, said)) > 2


def test_an_answer_without_text_is_one_response(
    registered: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model._tokenizer, "decode", lambda *_, **__: "")
    streamed, whole = ask(
        model, request(["ab"], [5], stream=True), request(["ab"], [5], stream=False)
    )
    assert answer(streamed) == answer(whole) == [[""]]


def test_a_wrong_request_has_one_error(registered: Path, model: Any) -> None:
    long, two, good = ask(
        model,
        request(["x" * CONTEXT], [5], stream=True),
        request(["a", "b"], [5, 5], stream=True),
        request(["ab"], [5], stream=True),
    )
    assert error(long).code() == triton_stand_in.TritonError.INVALID_ARG
    assert error(long).message() == (
        "text_input has 32 tokens and max_tokens is 5, but the model sees 32 in all"
    )
    assert error(two).message() == "stream is for one text; text_input has 2"
    assert "".join(piece for (piece,) in answer(good)) == greedy(registered, "ab", 5)


def test_a_step_that_fails_ends_those_in_it_and_the_thread_goes_on(
    registered: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory\nat an address")

    with monkeypatch.context() as patch:
        patch.setattr(model._rows, "step", fail)
        both = ask(model, request(["ab"], [5], stream=True), request(["b"], [5]))
        for each in both:
            assert error(each).code() == triton_stand_in.TritonError.INTERNAL
            assert error(each).message() == "RuntimeError: out of memory"
    (later,) = ask(model, request(["ab"], [5]))
    assert answer(later) == [[greedy(registered, "ab", 5)]]


def test_a_prompt_that_can_not_be_read_leaves_the_others(
    registered: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = model._rows._forward, []

    def full_at_the_second_prompt(ids: Any, mask: Any, cache: Any) -> Any:
        calls.append(ids.shape)
        if not cache and len([shape for shape in calls if shape[1] > 1]) > 1:
            raise RuntimeError("out of memory")
        return forward(ids, mask, cache)

    monkeypatch.setattr(model._rows, "_forward", full_at_the_second_prompt)
    (first,) = ask(model, request(["abc"], [28], stream=True))
    while not first.responses:
        assert not first.final.wait(0.001)
    (second,) = ask(model, request(["ab"], [5], stream=True))
    assert error(second).message() == "RuntimeError: out of memory"
    assert "".join(piece for (piece,) in answer(first)) == greedy(registered, "abc", 28)


def test_who_goes_away_makes_room(registered: Path, model: Any) -> None:
    made = []
    step = model._rows.step

    def counted() -> None:
        step()
        made.append(len(model._rows.jobs))
        if len(made) == 3:
            for each in gone:
                each.cancelled = True

    model._rows.step = counted
    asked = [request(["ab"], [28], stream=True) for _ in range(16)]
    gone = [each.sender for each in asked]
    waits = request(["abc"], [28], stream=True)
    ask(model, *asked, waits)
    assert "".join(piece for (piece,) in answer(waits.sender)) == greedy(registered, "abc", 28)
    for each in gone:
        assert error(each).code() == triton_stand_in.TritonError.CANCELLED
    assert made[-20:] == [1] * 20

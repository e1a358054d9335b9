"""Exports that stream in a real Triton Inference Server, by server-sent events and by gRPC."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from time import monotonic
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from pipelines.core.storage import write_json
from pipelines.export.triton_server import MAX_BATCH, export_triton
from tests.serving.models import PROMPTS, SHAPES, TALK, TOKENS, Kind, write_registered
from tests.serving.triton_program import ASKED, Triton, answers

pytestmark = pytest.mark.serving

MODELS: list[tuple[str, Kind]] = [
    *((shape, "plain") for shape in SHAPES),
    ("llama3", "lora"),
    ("llama3", "chat"),
    ("gpt2", "chat"),
]
LONG = 8192  # tokens; an answer as long takes a minute


@pytest.fixture(scope="module")
def model(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One that stays loaded, whose answers are as long as is asked: its name and folder."""
    folder = tmp_path_factory.mktemp("registered")
    registered = write_registered("llama2", "plain", folder, LONG)
    # A token that it does not have, so that an answer goes on as far as was asked.
    write_json(registered.folder / "generation_config.json", {"eos_token_id": 100_000})
    export_triton(registered.folder, triton.repository, "stays", 1, "python-stream")
    triton.load("stays")
    return "stays", registered.folder


def asked_for(prompt: str, most: int) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": most, "stream": True}


def rendered(folder: Path, prompt: str | list[Any]) -> str:
    """A conversation as its client writes it."""
    if isinstance(prompt, str):
        return prompt
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


def events(triton: Triton, name: str, body: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Each event of an answer, and when it came."""
    with triton.http.stream("POST", f"/v2/models/{name}/generate_stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = ((monotonic(), line) for line in answer.iter_lines() if line)
        return [(at, json.loads(line.removeprefix("data: "))) for at, line in lines]


def pieces(triton: Triton, name: str, body: dict[str, Any]) -> list[str]:
    said = [event["text_output"] for _, event in events(triton, name, body)]
    assert all(said)  # no event without text
    return said


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_the_pieces_are_the_text_of_transformers(
    triton: Triton, shape: str, kind: Kind, tmp_path: Path
) -> None:
    """Each alone, several at once that join each other's batches, and whole."""
    registered = write_registered(shape, kind, tmp_path)
    name = registered.name
    export_triton(registered.folder, triton.repository, name, 1, "python-stream")
    prompts = [*ASKED, (TALK, 40)] if registered.chat else ASKED
    expected = answers(registered.folder, prompts)
    assert len(set(expected)) == len(prompts)
    bodies = [asked_for(rendered(registered.folder, each), most) for each, most in prompts]
    triton.load(name)
    for body, answer in zip(bodies, expected, strict=True):
        said = pieces(triton, name, body)
        assert "".join(said) == answer
        assert len(said) > 1 or body["max_tokens"] == 1
        whole = triton.generate(name, body | {"stream": False}).json()
        assert whole == {"model_name": name, "model_version": "1", "text_output": answer}
    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(lambda body: pieces(triton, name, body), bodies * 6))
    assert ["".join(said) for said in together] == expected * 6
    assert triton.post(f"repository/models/{name}/unload").is_success


def grpc_inputs(prompt: str, most: int) -> list[grpc.InferInput]:
    values = {
        "text_input": np.array([[prompt.encode()]], dtype=object),
        "max_tokens": np.array([[most]], np.int32),
        "stream": np.array([[True]]),
    }
    types = {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}
    inputs = [grpc.InferInput(each, [1, 1], types[each]) for each in values]
    for each in inputs:
        each.set_data_from_numpy(values[each.name()])
    return inputs


class Stream:
    """A stream of gRPC with one or several requests for an answer in pieces."""

    def __init__(self, triton: Triton, name: str, asked: list[tuple[str, int]]) -> None:
        self.came: Queue[tuple[Any, Exception | None]] = Queue()
        self.client = grpc.InferenceServerClient(triton.grpc)
        self.client.start_stream(lambda result, error: self.came.put((result, error)))
        for number, (prompt, most) in enumerate(asked):
            inputs = grpc_inputs(prompt, most)
            self.client.async_stream_infer(
                name, inputs, request_id=str(number), enable_empty_final_response=True
            )

    def next(self) -> tuple[str, str, bool]:
        """The request's id, the piece and whether it is the last."""
        result, error = self.came.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        text = result.as_numpy("text_output")
        return (
            response.id,
            "" if text is None else text.item().decode(),
            response.parameters["triton_final_response"].bool_param,
        )

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def test_by_grpc_each_request_of_a_stream_has_pieces_of_its_own(
    triton: Triton, model: tuple[str, Path]
) -> None:
    name, folder = model
    stream = Stream(triton, name, [*ASKED, ("a", LONG)])
    said = dict.fromkeys(map(str, range(len(ASKED))), "")
    unfinished, order = set(said), []
    refused = None
    while unfinished or refused is None:
        try:
            number, piece, last = stream.next()
        except InferenceServerException as error:
            refused = error
            continue
        said[number] += piece
        order.append(number)
        unfinished -= {number} if last else set()
    stream.client.stop_stream()
    stream.client.close()
    assert list(said.values()) == answers(folder, ASKED)
    assert refused.message() == (
        f"text_input has 1 tokens and max_tokens is {LONG}, but the model sees {LONG} in all"
    )
    # They took turns.
    assert order.index("2") < len(order) - 1 - order[::-1].index("0") > order.index("3")


def test_others_are_answered_while_one_streams(triton: Triton, model: tuple[str, Path]) -> None:
    name, folder = model
    expected = answers(folder, ASKED)
    wrong = asked_for("a", LONG)
    stream = Stream(triton, name, [(PROMPTS[0], LONG - 32)])
    assert stream.next()[2] is False
    bodies = [asked_for(*each) for each in ASKED] * 3
    with ThreadPoolExecutor(24) as threads:
        asked = [each for body in bodies for each in (body, wrong)]
        said = list(threads.map(lambda body: events(triton, name, body), asked))
    for (_, last), *more in said[1::2]:
        assert more == []
        assert last == {
            "error": f"text_input has 1 tokens and max_tokens is {LONG}, "
            f"but the model sees {LONG} in all"
        }
    texts = ["".join(event["text_output"] for _, event in each) for each in said[::2]]
    assert texts == expected * 3
    while not stream.came.empty():
        assert stream.next()[2] is False  # it is not at its end yet
    stream.cancel()


def test_pieces_come_one_by_one(triton: Triton, model: tuple[str, Path]) -> None:
    name, folder = model
    began = monotonic()
    came = events(triton, name, asked_for(PROMPTS[0], 400))
    took = came[-1][0] - began
    assert len(came) > 200
    assert sum(at - began < took / 2 for at, _ in came) > len(came) // 4
    said = "".join(event["text_output"] for _, event in came)
    assert [said] == answers(folder, [(PROMPTS[0], 400)])


def test_a_client_of_grpc_that_goes_away_frees_the_model(
    triton: Triton, model: tuple[str, Path]
) -> None:
    """Otherwise the next request would wait minutes."""
    name, folder = model
    expected = answers(folder, ASKED[:1])
    stream = Stream(triton, name, [(PROMPTS[0], LONG - 32)] * MAX_BATCH)
    numbers = set()
    while len(numbers) < MAX_BATCH:
        numbers.add(stream.next()[0])
    body = asked_for(*ASKED[0])
    with pytest.raises(httpx.ReadTimeout):
        triton.http.post(f"/v2/models/{name}/generate_stream", json=body, timeout=3)
    stream.cancel()
    began = monotonic()
    assert ["".join(pieces(triton, name, body))] == expected
    assert monotonic() - began < 10


def test_a_client_of_http_that_goes_away_frees_the_model(
    triton: Triton, model: tuple[str, Path]
) -> None:
    name, folder = model
    expected = answers(folder, ASKED[:1])
    body = asked_for(PROMPTS[0], LONG - 32)
    with ExitStack() as stack:
        for _ in range(MAX_BATCH):
            path = f"/v2/models/{name}/generate_stream"
            answer = stack.enter_context(triton.http.stream("POST", path, json=body))
            assert next(answer.iter_lines()).startswith("data: ")
    began = monotonic()
    assert ["".join(pieces(triton, name, asked_for(*ASKED[0])))] == expected
    assert monotonic() - began < 10


def test_what_triton_itself_refuses(triton: Triton, model: tuple[str, Path]) -> None:
    """As docs/models.md says."""
    name, _ = model
    plain = triton.post(f"models/{name}/infer", triton.inputs([PROMPTS[0]], [TOKENS]))
    assert plain.status_code == 501
    assert "doesn't support models with decoupled transaction policy" in plain.json()["error"]
    with (
        grpc.InferenceServerClient(triton.grpc) as client,
        pytest.raises(InferenceServerException, match="doesn't support models with decoupled"),
    ):
        client.infer(name, grpc_inputs(PROMPTS[0], TOKENS))
    stream = triton.generate(name, asked_for(PROMPTS[0], TOKENS))
    assert "use generate stream" in stream.json()["error"]
    no_text = triton.generate(name, {"max_tokens": 3})
    assert no_text.status_code == 400
    assert no_text.json() == {"error": "text_input is missing; it is the text to continue"}

"""Exports in a real Triton Inference Server (the one in the wheel `nvidia-pytriton`), by HTTP."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import httpx
import pytest
import torch

from pipelines.export.hf_folder import export_whole
from pipelines.export.triton_server import export_triton
from tests.serving.models import CONTEXT, PROMPTS, SHAPES, TOKENS, Kind, write_registered
from tests.serving.triton_program import ASKED, Triton, answers, served

pytestmark = pytest.mark.serving

FIT = {"text_input": ASKED[0][0], "max_tokens": ASKED[0][1]}
# Each loads PyTorch into a process of its own. To Triton a merged model is like any other.
MODELS: list[tuple[str, Kind]] = [
    *((shape, "plain") for shape in SHAPES),
    ("llama3", "lora"),
    ("gpt2", "lora"),
]


@pytest.fixture(scope="module")
def model(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One that stays loaded: its name and folder."""
    registered = write_registered("llama2", "plain", tmp_path_factory.mktemp("registered"))
    export_triton(registered.folder, triton.repository, "stays", 1, "python")
    triton.load("stays")
    return "stays", registered.folder


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_it_answers_with_the_tokens_of_transformers(
    triton: Triton, shape: str, kind: Kind, tmp_path: Path
) -> None:
    """Each alone, all in one request, and many requests at once in Triton's own batches."""
    registered = write_registered(shape, kind, tmp_path)
    name = registered.name
    export_triton(registered.folder, triton.repository, name, 1, "python")
    expected = answers(registered.folder, ASKED)
    assert len(set(expected)) == len(ASKED)
    triton.load(name)
    for (prompt, most), answer in zip(ASKED, expected, strict=True):
        alone = triton.generate(name, {"text_input": prompt, "max_tokens": most})
        assert alone.json() == {
            "model_name": name,
            "model_version": "1",
            "text_output": answer,
        }
    prompts, tokens = zip(*ASKED, strict=True)
    assert triton.infer(name, prompts, tokens) == expected
    with ThreadPoolExecutor(24) as threads:
        together = threads.map(lambda asked: triton.infer(name, [asked[0]], [asked[1]]), ASKED * 6)
        assert list(together) == [[answer] for answer in expected] * 6
    assert triton.batches(name) < len(ASKED) + 24  # some of those at once were one batch
    assert triton.post(f"repository/models/{name}/unload").is_success


def test_a_wrong_request_gets_one_clear_line_and_spoils_no_other(
    triton: Triton, model: tuple[str, Path]
) -> None:
    name, folder = model
    (expected,) = answers(folder, [ASKED[0]])
    wrong = {
        "text_input has 1 tokens and max_tokens is 128, but the model sees 128 in all": {
            "text_input": "a",
            "max_tokens": CONTEXT,
        },
        "text_input has 1 tokens and max_tokens is 2147483647, but the model sees 128 in all": {
            "text_input": "a",
            "max_tokens": 2**31 - 1,
        },
        "max_tokens is 0; it must be at least 1": {"text_input": "a", "max_tokens": 0},
        "text_input is missing; it is the text to continue": {"max_tokens": 3},
    }
    with ThreadPoolExecutor(24) as threads:
        asked = [each for bad in wrong.values() for each in (bad, FIT)] * 3
        said = list(threads.map(lambda body: triton.generate(name, body), asked))
    for body, answer in zip(asked, said, strict=True):
        if body is FIT:
            assert answer.json()["text_output"] == expected
        else:
            assert answer.status_code == 400
            assert body in [bad for line, bad in wrong.items() if answer.json() == {"error": line}]
    assert triton.infer(name, [ASKED[0][0]], [ASKED[0][1]]) == [expected]


def test_an_empty_prompt_a_number_of_tokens_not_given_and_a_stream(
    triton: Triton, model: tuple[str, Path]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, folder = model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = torch.tensor([[tokenizer.eos_token_id]])
    made = AutoModelForCausalLM.from_pretrained(folder).generate(
        begin, max_new_tokens=TOKENS, do_sample=False
    )
    expected = tokenizer.decode(made[0, 1:], skip_special_tokens=True)
    assert triton.infer(name, [""], [TOKENS]) == [expected]
    assert triton.infer(name, [PROMPTS[1]], None) == answers(folder, [(PROMPTS[1], 64)])
    # All at once, as one event.
    body = {"text_input": PROMPTS[0], "max_tokens": TOKENS}
    stream = triton.post(f"models/{name}/generate_stream", body)
    (event,) = stream.text.split("\n\n")[:-1]
    (text,) = answers(folder, [(PROMPTS[0], TOKENS)])
    assert httpx.Response(200, text=event.removeprefix("data: ")).json()["text_output"] == text


def grow(repository: Path, number: int, folder: Path) -> dict[str, str]:
    """Export a version of the model `grows`; returns what it is to answer to FIT."""
    registered = write_registered("qwen3", "plain" if number == 1 else "lora", folder)
    export_triton(registered.folder, repository, "grows", number, "python")
    (text,) = answers(registered.folder, ASKED[:1])
    return {"model_name": "grows", "model_version": str(number), "text_output": text}


def test_a_second_version_takes_over_when_the_server_is_told(
    triton: Triton, tmp_path: Path
) -> None:
    for number in (1, 2):
        expected = grow(triton.repository, number, tmp_path)
        triton.load("grows")
        assert triton.generate("grows", FIT).json() == expected


def test_a_server_that_polls_loads_each_version_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the export takes longer than a poll; the first version answers meanwhile."""

    def slow(source: Path, folder: Path) -> None:
        export_whole(source, folder)
        sleep(3)

    monkeypatch.setattr("pipelines.export.triton_server.export_whole", slow)
    with served(tmp_path, "--model-control-mode=poll", "--repository-poll-secs=1") as triton:
        first = grow(triton.repository, 1, tmp_path)
        said = triton.answers_until("grows", FIT, first)
        assert not any("text_output" in answer for answer in said)
        second = grow(triton.repository, 2, tmp_path)
        assert all(answer == first for answer in triton.answers_until("grows", FIT, second))
        sleep(3)
    log = (tmp_path / "log").read_text()
    assert re.findall(r'"(loading: .*)"', log) == ["loading: grows:1", "loading: grows:2"]

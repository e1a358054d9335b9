"""llama.cpp says what transformers says, token by token, from the file that is exported for it."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.core.errors import UserError
from pipelines.core.machine import free_port
from pipelines.data.tokens.fast_encoder import HARD_TEXTS, byte_alphabet
from pipelines.data.tokens.tokenizer import Encoder, byte_tokenizer, save_tokenizer
from pipelines.export.gguf_file import FILE, Weights, export_gguf, write_rounded
from pipelines.models.pretrained import load_pretrained, save_pretrained
from tests.serving.models import (
    KINDS,
    PROMPTS,
    SHAPES,
    TALK,
    TOKENS,
    Kind,
    greedy,
    write_registered,
)
from tests.serving.servers import environment, running
from tests.unit.export.models import write_pretrained_tokenizer

pytestmark = pytest.mark.serving

RUN = [shape for shape in SHAPES if shape != "gptj"]
TEXT = "The valve number 7 opens, and water turns a wheel. " * 3
FP32 = ["--type_k", "0", "--type_v", "0"]  # GGML's number of the type
ENDS = ("<|endoftext|>", "<|im_end|>")


@dataclass(frozen=True)
class Served:
    """A registered folder, the file that was made of it, and the file's context."""

    source: Path
    file: Path
    context: int


def exported(source: Path, to: Path, weights: Weights = "own") -> Served:
    to.mkdir(parents=True)
    return Served(source, to / FILE, export_gguf(source, to, weights, "m@1"))


@pytest.fixture(params=RUN)
def shape(request):
    return request.param


@pytest.fixture(params=KINDS)
def served(request, shape, tmp_path):
    environment("llama")
    made = write_registered(shape, request.param, tmp_path)
    return exported(made.folder, tmp_path / "exported")


def llama_cpp(served: Served, **asked: Any) -> dict[str, Any]:
    """What the program answers; see its text."""
    given = {"model": str(served.file), "texts": [], "scored": [], "prompts": []}
    done = subprocess.run(
        [environment("llama") / "bin" / "python", Path(__file__).with_name("llama_cpp_program.py")],
        input=json.dumps(given | asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def asked_texts(source: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.chat_template is None:
        return PROMPTS
    talk = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    return [*PROMPTS, talk]


def reference(source: Path) -> list[list[int]]:
    has_talk = len(asked_texts(source)) > len(PROMPTS)
    return greedy(source, [*PROMPTS, TALK] if has_talk else PROMPTS)


def test_llama_cpp_answers_with_transformers_tokens(served: Served) -> None:
    texts = asked_texts(served.source)
    tokenizer = AutoTokenizer.from_pretrained(served.source)
    prompts = [tokenizer(text, add_special_tokens=True).input_ids for text in texts]
    expected = [
        answer[: max(0, served.context - len(prompt))]
        for prompt, answer in zip(prompts, reference(served.source), strict=True)
    ]
    lengths = [len(answer) for answer in expected]
    assert sum(lengths) > TOKENS
    asked = [pair for pair in zip(prompts, lengths, strict=True) if pair[1]]
    found = llama_cpp(served, texts=texts, prompts=asked)
    assert found["ids"] == prompts
    assert found["answers"] == [answer for answer in expected if answer]


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "GPT-2": lambda folder: None,
    "bytes": lambda folder: save_tokenizer(byte_tokenizer(), folder),
    "GPT-4": partial(write_pretrained_tokenizer, "GPT-4, Llama 3", False),
    "Llama 3": partial(write_pretrained_tokenizer, "GPT-4, Llama 3", True),
    "Qwen 2": partial(write_pretrained_tokenizer, "Qwen 2", False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_that_are_hard_to_cut_have_the_same_ids(name: str, tmp_path: Path) -> None:
    source = write_registered("llama2", "plain", tmp_path).folder
    TOKENIZERS[name](source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [*HARD_TEXTS, "the valve<|endoftext|> opens"]
    found = llama_cpp(exported(source, tmp_path / "exported"), texts=texts)["ids"]
    for text, ids in zip(texts, found, strict=True):
        assert ids == tokenizer(text).input_ids, text


OTHERS = {
    "llama with biases": replace(
        SHAPES["llama3"], qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=False
    ),
    "llama with wide heads": replace(SHAPES["llama2"], head_dim=64),
    "qwen3 with tied embeddings": replace(SHAPES["qwen3"], tie_embeddings=True),
    "gemma3 with every third layer full and linear scaling": replace(
        SHAPES["gemma3"], layers=4, full_attention_every=3, rope_divisor=8.0, tie_embeddings=False
    ),
    "phi3 with tied embeddings": replace(
        SHAPES["phi3"], tie_embeddings=True, rotary_fraction=0.75, rope_theta=5000.0
    ),
    "gpt_neox without biases": replace(
        SHAPES["gpt_neox"], qkv_bias=False, output_bias=False, tie_embeddings=True
    ),
    "gpt_neox in sequence": replace(
        SHAPES["gpt_neox"], parallel_residual=False, rotary_fraction=1.0, activation="gelu_tanh"
    ),
    "gpt2 with a head of its own": replace(SHAPES["gpt2"], tie_embeddings=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_familys_options_are_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, name, OTHERS[name])
    source = write_registered(name, "plain", tmp_path).folder
    prompts = [AutoTokenizer.from_pretrained(source)(text).input_ids for text in PROMPTS]
    answers = greedy(source, PROMPTS)
    asked = [(prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    assert llama_cpp(exported(source, tmp_path / "exported"), prompts=asked)["answers"] == answers


def mean_nats(folder: Path, ids: list[int]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)


@pytest.mark.parametrize(("weights", "bound"), [("own", 5e-4), ("f16", 3e-3), ("q8_0", 0.05)])
def test_the_loss_is_that_of_the_registered_weights(
    shape: str, weights: Weights, bound: float, tmp_path: Path
) -> None:
    """In nats, of about 8; also that of the copy which is measured for it."""
    source = write_registered(shape, "plain", tmp_path).folder
    made = exported(source, tmp_path / "exported", weights)
    copy = tmp_path / "copy"
    copy.mkdir()
    write_rounded(source, copy, weights)
    ids = AutoTokenizer.from_pretrained(source)(TEXT).input_ids[: made.context]
    (found,) = llama_cpp(made, scored=[ids])["nats"]
    assert found == pytest.approx(mean_nats(source, ids), abs=bound)
    assert found == pytest.approx(mean_nats(copy, ids), abs=bound)


def test_bf16_weights_have_their_loss(shape: str, tmp_path: Path) -> None:
    source = write_registered(shape, "plain", tmp_path).folder
    save_pretrained(load_pretrained(source).to(torch.bfloat16), source, Encoder(source).end_id)
    made = exported(source, tmp_path / "exported")
    ids = AutoTokenizer.from_pretrained(source)(TEXT).input_ids[: made.context]
    (found,) = llama_cpp(made, scored=[ids])["nats"]
    assert found == pytest.approx(mean_nats(source, ids), abs=0.05)


def said(folder: Path, ids: list[int]) -> str:
    """The text of an answer as llama.cpp's server gives it: without marks and halves of letters."""
    byte = {character: number for number, character in enumerate(byte_alphabet())}
    text = bytearray()
    for token in AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(ids):
        if token in ENDS:
            break
        text += bytes(byte[character] for character in token if token != "<|im_start|>")
    return text.decode(errors="ignore")


@contextmanager
def served_by_llama_cpp(made: Served, folder: Path) -> Iterator[httpx.Client]:
    """A client of its server; the server's log is in the folder."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    python = environment("llama") / "bin" / "python"
    command = [python, "-m", "llama_cpp.server", "--model", made.file, "--port", str(port)]
    command += ["--n_ctx", "0", "--n_threads", "1", *FP32]
    with (
        running(command, f"{url}/v1/models", folder / "log"),
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("shape", "kind"), [("llama3", "chat"), ("qwen2", "lora"), ("mistral", "plain")]
)
def test_its_server_answers_openais_clients_with_the_same(
    shape: str, kind: Kind, tmp_path: Path
) -> None:
    """It goes on beyond `max_tokens` while an answer may end within a letter."""
    made = exported(write_registered(shape, kind, tmp_path).folder, tmp_path / "exported")
    with served_by_llama_cpp(made, tmp_path) as client:
        asked = {"max_tokens": TOKENS // 2, "temperature": 0.0, "repeat_penalty": 1.0}
        for prompt, ids in zip(PROMPTS, greedy(made.source, PROMPTS), strict=True):
            answer = client.post("/v1/completions", json={"prompt": prompt, **asked}).json()
            expected = said(made.source, ids[: answer["usage"]["completion_tokens"]])
            assert answer["choices"][0]["text"] == expected
        if kind == "chat":
            (ids,) = greedy(made.source, [TALK])
            answer = client.post("/v1/chat/completions", json={"messages": TALK, **asked}).json()
            expected = said(made.source, ids[: answer["usage"]["completion_tokens"]])
            assert answer["choices"][0]["message"]["content"] == expected


def test_what_is_longer_than_the_window_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp rounds a context up to a multiple of 256 tokens."""
    longer = replace(SHAPES["mistral"], sliding_window=256, context_length=512)
    monkeypatch.setitem(SHAPES, "mistral", longer)
    made = exported(write_registered("mistral", "plain", tmp_path).folder, tmp_path / "exported")
    with served_by_llama_cpp(made, tmp_path) as client:
        asked = {"prompt": TEXT * 9, "max_tokens": 1}
        refused = client.post("/v1/completions", json=asked).json()["error"]["message"]
    assert "maximum context length is 256 tokens" in refused


def test_a_gptj_is_refused(tmp_path: Path) -> None:
    folder = write_registered("gptj", "plain", tmp_path).folder
    with pytest.raises(UserError, match="cannot run models of the family gptj"):
        export_gguf(folder, tmp_path, "own", "m@1")

"""Scores equal a plain loop's and transformers' own loss, however the work is batched."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from pipelines.core.errors import UserError
from pipelines.data.tokens.chat_encoder import ChatEncoder, make_chat_tokenizer
from pipelines.data.tokens.tokenizer import byte_tokenizer, character_tokenizer, save_tokenizer
from pipelines.evaluation import perplexity
from pipelines.evaluation.bootstrap import bits_per_byte, token_perplexity
from pipelines.evaluation.perplexity import score_documents
from pipelines.evaluation.text_codec import EncodedText
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction

CONTEXT = 16
END = 256
TEXTS = ["a", "short one", "längér: é" * 3, "x" * CONTEXT, "y" * (CONTEXT + 1), "def f():\n" * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny byte-level model with weights large enough that each token's loss differs."""
    path = tmp_path_factory.mktemp("model")
    model = Transformer(preset("llama-100k").sized(257, CONTEXT))
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    save_pretrained(model, path, end_of_text=END)
    save_tokenizer(byte_tokenizer(), path)
    return path


def table(texts: list[str]) -> pa.Table:
    return pa.table({"doc_id": [f"{index:04d}" for index in range(len(texts))], "text": texts})


def naive_nats(model: Transformer, text: str, overlap: int = CONTEXT // 4) -> float:
    """One token at a time, each with the context that its window gives it."""
    ids = [END, *text.encode()]
    nats, start = 0.0, 0
    for position in range(len(ids) - 1):
        if position - start == CONTEXT:
            start = position - overlap
        with torch.inference_mode():
            logits = model(torch.tensor([ids[start : position + 1]]))[0, -1]
        nats -= logits.double().log_softmax(-1)[ids[position + 1]].item()
    return nats


def test_equals_a_loop_over_single_tokens(folder: Path) -> None:
    scores = score_documents(folder, table(TEXTS))
    model = load_pretrained(folder).eval()
    expected = [naive_nats(model, text) for text in TEXTS]
    np.testing.assert_allclose(scores["nats"].to_numpy(), expected, rtol=1e-5)
    assert scores["tokens"].to_pylist() == [len(text.encode()) for text in TEXTS]
    assert scores["bytes"].to_pylist() == scores["tokens"].to_pylist()
    assert scores["doc_id"].to_pylist() == table(TEXTS)["doc_id"].to_pylist()


@pytest.mark.parametrize(("stride", "overlap"), [(0.01, 15), (0.5, 8), (1.0, 0)])
def test_windows_overlap_by_what_the_stride_leaves(
    folder: Path, stride: float, overlap: int
) -> None:
    scores = score_documents(folder, table(TEXTS), stride)
    model = load_pretrained(folder).eval()
    expected = [naive_nats(model, text, overlap) for text in TEXTS]
    np.testing.assert_allclose(scores["nats"].to_numpy(), expected, rtol=1e-5)


def test_equals_the_loss_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "import os"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(tokenizer.eos_token + text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()  # mean nats a token
    scores = score_documents(folder, table([text]))
    assert scores["nats"][0].as_py() / scores["tokens"][0].as_py() == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("stride", [0.5, 0.75])
def test_the_perplexity_is_that_of_transformers(folder: Path, stride: float) -> None:
    """Over documents of many windows, as Hugging Face's guide to perplexity takes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    step = int(stride * CONTEXT)
    nats, count = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(tokenizer.eos_token + text, return_tensors="pt").input_ids
        inputs, labels = ids[:, :-1], ids[:, 1:]
        length = inputs.shape[1]
        done = 0
        while done < length:
            # The first window predicts all of its tokens, each later one those after the overlap.
            start = max(0, done - (CONTEXT - step))
            stop = min(start + CONTEXT, length)
            with torch.inference_mode():
                logits = model(inputs[:, start:stop]).logits[0, done - start :]
            nats += F.cross_entropy(logits, labels[0, done:stop], reduction="sum").item()
            done = stop
        count += length
    ours = token_perplexity(score_documents(folder, table(TEXTS), stride))
    assert ours == pytest.approx(math.exp(nats / count), rel=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_batches_change_nothing(
    folder: Path, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = score_documents(folder, table(TEXTS))["nats"].to_numpy()
    monkeypatch.setattr(perplexity, "_CPU_BATCH_TOKENS", batch_tokens)
    alone = [score_documents(folder, table([text]))["nats"][0].as_py() for text in TEXTS]
    together = score_documents(folder, table(TEXTS[::-1]))["nats"].to_numpy()[::-1]
    np.testing.assert_allclose(alone, expected, rtol=1e-5)
    np.testing.assert_allclose(together, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["gpt2-124m", "pythia-160m", "mistral-7b", "qwen3-0.6b", "phi3-mini-4k", "gemma3-1b"]
)
def test_models_of_other_families_are_scored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one window has more logits than a batch may."""
    shape = replace(preset(name), layers=2, width=32, heads=4, kv_heads=4, hidden=48)
    model = Transformer(shape.sized(257, CONTEXT)).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_pretrained(model, tmp_path, end_of_text=END)
    save_tokenizer(byte_tokenizer(), tmp_path)
    expected = [naive_nats(model, text) for text in TEXTS]
    for logits in (perplexity._LOGITS, 10 * 257):
        monkeypatch.setattr(perplexity, "_LOGITS", logits)
        found = score_documents(tmp_path, table(TEXTS))["nats"].to_pylist()
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_model_that_knows_nothing_needs_eight_bits_a_byte(tmp_path: Path) -> None:
    model = Transformer(preset("llama-100k").sized(256 + 1, CONTEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_pretrained(model, tmp_path, end_of_text=END)
    save_tokenizer(byte_tokenizer(), tmp_path)
    scores = score_documents(tmp_path, table(TEXTS))
    assert bits_per_byte(scores) == pytest.approx(math.log2(257), abs=1e-6)
    assert token_perplexity(scores) == pytest.approx(257, abs=1e-3)


@pytest.mark.parametrize("stride", [0.01, 0.5, 0.75, 1.0])
def test_every_token_is_a_target_once(stride: float) -> None:
    for length in range(1, 70):
        ids = np.arange(length)
        for scored in (np.ones(length, bool), ids % 23 > 19):
            document = EncodedText(ids, scored, 0.0)
            windows = list(perplexity._windows(0, document, END, CONTEXT, stride))
            targets = [target for w in windows for target in w.targets if target >= 0]
            assert targets == ids[scored].tolist()
            assert all(len(w.inputs) <= CONTEXT for w in windows)


def test_of_a_conversation_what_the_assistant_says_is_scored(tmp_path: Path) -> None:
    """And it is what a model of everything says of those tokens."""
    save_tokenizer(byte_tokenizer(), tmp_path)
    make_chat_tokenizer(tmp_path, Instruction(kind="messages"))
    model = Transformer(preset("llama-100k").sized(259, 256))
    model.init_weights(0)
    save_pretrained(model, tmp_path, end_of_text=END)
    talk = (("user", "How many?"), ("assistant", "zwölf"), ("user", "Sure?"), ("assistant", "ja"))
    documents = table(["plain", "\n\n".join(content for _, content in talk), "text"])
    messages = [None, json.dumps(talk), None]
    scores = score_documents(tmp_path, documents.append_column("messages", pa.array(messages)))
    ((ids, mask, _),) = ChatEncoder(tmp_path).encode([talk])
    with torch.inference_mode():
        logits = model(torch.tensor([[END, *ids[:-1].tolist()]]))[0].double()
    losses = F.cross_entropy(logits, torch.tensor(ids.tolist()), reduction="none")
    assert scores["nats"][1].as_py() == pytest.approx(losses[mask == 1].sum().item(), rel=1e-5)
    assert scores["bytes"].to_pylist() == [5, len("zwölfja".encode()), 4]
    assert scores["tokens"].to_pylist() == [5, int(mask.sum()), 4]
    alone = score_documents(tmp_path, table(["plain", "text"]))
    assert alone["nats"].to_pylist() == pytest.approx(scores["nats"].take([0, 2]).to_pylist())


def test_an_unknown_character_is_charged_its_bytes(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    save_tokenizer(tokenizer, tmp_path)
    model = Transformer(preset("llama-100k").sized(tokenizer.get_vocab_size(), CONTEXT))
    model.init_weights(0)
    save_pretrained(model, tmp_path, end_of_text=0)
    scores = score_documents(tmp_path, table(["abc", "ab€"]))
    known, unknown = scores["nats"].to_pylist()
    assert unknown - known == pytest.approx(math.log(256) * 3, abs=0.5)


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        score_documents(tmp_path, table(["a"]))


def test_cross_entropy_of_the_mean_is_what_perplexity_says(folder: Path) -> None:
    scores = score_documents(folder, table(TEXTS[:2]))
    model = load_pretrained(folder).eval()
    losses = []
    for text in TEXTS[:2]:
        ids = torch.tensor([[END, *text.encode()]])
        with torch.inference_mode():
            logits = model(ids[:, :-1])
        losses.append(F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item())
    mean = sum(losses) / sum(len(text) for text in TEXTS[:2])
    assert token_perplexity(scores) == pytest.approx(math.exp(mean), rel=1e-5)


@pytest.mark.parametrize("nats", [math.nan, math.inf, 1e6])
def test_a_diverged_model_gets_a_figure_all_the_same(nats: float) -> None:
    """The gate refuses it by that figure; an exception would hide why."""
    scores = pa.table({"nats": [1.0, nats], "bytes": [1, 1], "tokens": [1, 1]})
    assert token_perplexity(scores) == math.inf
    assert not bits_per_byte(scores) < 1e5

"""Greedy text is transformers' greedy text; sampled text follows its seed."""

from pathlib import Path

import pytest
import torch

from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.evaluation.generate import generate
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer

CONTEXT = 32
END = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = Transformer(preset("llama-100k").sized(257, CONTEXT))
    model.init_weights(3)
    with torch.no_grad():
        # ASCII only, so that each id is one character of the text.
        model.embed_tokens.weight[128:] = -model.embed_tokens.weight[:129]
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    save_pretrained(model, path, end_of_text=END)
    save_tokenizer(byte_tokenizer(), path)
    return path


def test_greedy_equals_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(tokenizer.eos_token + "def ", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert generate(folder, ["def "], 20) == [expected]


def test_a_seed_gives_the_same_text_whatever_the_other_prompts(folder: Path) -> None:
    def sampled(prompts: list[str], seed: int) -> list[str]:
        return generate(folder, prompts, 20, temperature=1.0, seed=seed)

    assert sampled(["a", "b"], 1)[1] == sampled(["b"], 1)[0]
    assert sampled(["a"], 1) != sampled(["a"], 2)


def test_goes_on_past_the_context(folder: Path) -> None:
    ids = [END, *b"x" * 40]
    text = generate(folder, ["x" * 40], 3 * CONTEXT)[0]
    with torch.inference_mode():
        first = load_pretrained(folder)(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax().item()
    assert text.encode("utf-8", "replace")[:1] in (bytes([first]), b"\xef")


def test_nothing_asked_nothing_made(folder: Path) -> None:
    assert generate(folder, ["a", ""], 0) == ["", ""]


def test_stops_where_the_model_ends_the_text(tmp_path: Path) -> None:
    model = Transformer(preset("llama-100k").sized(257, CONTEXT))
    model.init_weights(0)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[END] = 1.0
        model.embed_tokens.weight[ord("a")] = 0.5
    save_pretrained(model, tmp_path, end_of_text=END)
    save_tokenizer(byte_tokenizer(), tmp_path)
    assert generate(tmp_path, ["a"], 50) == [""]


def test_an_answer_ends_with_the_turn(tmp_path: Path) -> None:
    """A model that has learned one answer by heart gives it, and no more."""
    from pipelines.data.tokens.chat_encoder import ChatEncoder, make_chat_tokenizer
    from pipelines.recipe.data_section import Instruction

    save_tokenizer(byte_tokenizer(), tmp_path)
    make_chat_tokenizer(tmp_path, Instruction(kind="messages"))
    ((ids, _, _),) = ChatEncoder(tmp_path).encode([(("user", "hm?"), ("assistant", "Yes."))])
    torch.manual_seed(0)
    model = Transformer(preset("llama-100k").sized(259, 128))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.tensor([[END, *ids.tolist()]])
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).backward()
        optimizer.step()
    save_pretrained(model, tmp_path, end_of_text=END)
    assert generate(tmp_path, ["hm?"], 20, chat=True) == ["Yes."]

"""Models of each family as the registry keeps them, and what each is to answer, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.tokenizer import train_bpe
from pipelines.models.config import DecoderConfig, RopeScaling
from pipelines.models.families import flags
from pipelines.models.lora import adapted_layers, add_adapters, chosen_sizes, init_adapters
from pipelines.models.peft_format import save_adapter
from pipelines.models.pretrained import load_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.training_section import Adapter
from tests.unit.export import models

Kind = Literal["plain", "chat", "lora"]
KINDS: tuple[Kind, ...] = ("plain", "chat", "lora")
CONTEXT, TOKENS = 128, 16
PROMPTS = ["The valve opens", "Water", "a wheel turns in the pipe, and"]
TALK = [{"role": "user", "content": "Does the valve open?"}]

# A head of 32 is the smallest that vLLM has for processors, and llama.cpp's smallest blocks are of
# 256 weights of a row.
_SIZE: dict[str, Any] = {
    "layers": 2,
    "width": 256,
    "heads": 8,
    "kv_heads": 8,
    "hidden": 512,
    "context_length": CONTEXT,
    "vocab_size": 1,
}
_GROUPED = _SIZE | {"kv_heads": 2}
SHAPES = {
    "llama2": DecoderConfig(**_SIZE, tie_embeddings=False),
    "llama3": DecoderConfig(
        **_GROUPED, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
    ),
    "mistral": DecoderConfig(**_GROUPED | flags("mistral") | {"sliding_window": 24}),
    "qwen2": DecoderConfig(**_GROUPED | flags("qwen2") | {"tie_embeddings": True}),
    "qwen3": DecoderConfig(**_GROUPED | flags("qwen3") | {"head_dim": 64}),
    "phi3": DecoderConfig(**_GROUPED | flags("phi3")),
    "gemma3": DecoderConfig(
        **_GROUPED
        | flags("gemma3_text")
        | {"kv_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
        | {"sliding_window": 24, "full_attention_every": 2, "local_rope_theta": 5000.0}
    ),
    "gpt2": DecoderConfig(**_SIZE, **flags("gpt2")),
    "gpt_neox": DecoderConfig(**_SIZE, **flags("gpt_neox"), rotary_fraction=0.25),
    "gptj": DecoderConfig(**_SIZE, **flags("gptj"), rotary_fraction=0.5),
}


@dataclass(frozen=True)
class Registered:
    """A folder as *register* leaves it, and its base's where an adapter was trained."""

    name: str
    folder: Path
    chat: bool = False
    base: Path | None = None


def write_registered(
    shape: str, kind: Kind, folder: Path, context_length: int = CONTEXT
) -> Registered:
    """Write a model with random weights into new folders in a folder."""
    config = replace(SHAPES[shape], context_length=context_length)
    made = Registered(
        f"{shape}-{kind}",
        folder / f"{shape}-{kind}",
        chat=kind == "chat",
        base=folder / f"{shape}-base" if kind == "lora" else None,
    )
    if made.base is None:
        _write(_random(config, made), made.folder, made.chat)
        return made
    _write(_random(config, made), made.base, made.chat)
    model = load_pretrained(made.base)
    adapter = Adapter(kind="lora", rank=8, alpha=16)
    add_adapters(model, chosen_sizes(model, adapter), adapter)
    init_adapters(model, seed=1)
    for number, layer in enumerate(adapted_layers(model).values()):
        layer.lora_b.weight.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    save_adapter(model, made.folder / "adapter")
    _write(model, made.folder, made.chat)
    return made


def _random(config: DecoderConfig, made: Registered) -> Transformer:
    """Weights so large that what follows differs from token to token."""
    rows = 320 + 2 * made.chat
    torch.manual_seed(5)
    model = Transformer(replace(config, vocab_size=rows))
    for name, parameter in model.named_parameters():
        scale = parameter.ndim == 1 and name.endswith("weight")  # a norm's
        torch.nn.init.normal_(parameter, float(scale), 0.15)
        if config.scaled_embeddings and name == "embed_tokens.weight":
            parameter.data /= config.width**0.5  # else each token would follow itself
    return model.eval()


def _write(model: Transformer, folder: Path, chat: bool) -> None:
    texts = [f"The valve number {n} opens, and water turns a wheel." for n in range(200)]
    models.write_registered(model, folder, train_bpe(texts, 320))
    if chat:
        make_chat_tokenizer(folder, Instruction(kind="messages"))


@torch.inference_mode()
def answered_by_transformers(
    folder: Path, prompts: Sequence[str | list[Any]], tokens: int = TOKENS
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each prompt, and those that transformers' `generate` continues it with.

    A prompt is a text, or the messages of a conversation.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            rendered = {"add_generation_prompt": True, "return_tensors": "pt"}
            ids = tokenizer.apply_chat_template(prompt, **rendered).input_ids
        (row,) = model.generate(ids, max_new_tokens=tokens, do_sample=False).tolist()
        made.append((row[: ids.shape[1]], row[ids.shape[1] :]))
    return made


def greedy(
    folder: Path, prompts: Sequence[str | list[Any]], tokens: int = TOKENS
) -> list[list[int]]:
    """Return only the answers' ids."""
    return [answer for _, answer in answered_by_transformers(folder, prompts, tokens)]

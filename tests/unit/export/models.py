"""Small models as the registry keeps them."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pipelines.core.storage import write_json, write_text
from pipelines.data.tokens.fast_encoder import PATTERNS
from pipelines.data.tokens.tokenizer import (
    TOKENIZER_FILE,
    Encoder,
    byte_tokenizer,
    save_tokenizer,
    train_bpe,
)
from pipelines.models.lora import adapted_layers, add_adapters, chosen_sizes, init_adapters
from pipelines.models.peft_format import save_adapter
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.training_section import Adapter

END, CONTEXT = 256, 32
PROMPTS = ["def f(x):", "import os\n", "a", "class Long:\n    pass"]


def loud(model: Transformer, by: float = 3.0) -> Transformer:
    """Weights so large that what follows differs from token to token."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by if parameter.ndim > 1 else 1.0)
    return model.eval()


def small(name: str = "llama-100k", **changes: int) -> Transformer:
    """Layers of widths that groups of 32 and 64 divide."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "hidden": 128, **changes}
    model = Transformer(replace(preset(name), **sizes).sized(257, CONTEXT))  # type: ignore[arg-type]
    model.init_weights(0)
    return loud(model)


def write_registered(model: Transformer, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A folder as *register* leaves it in the artifact store; tokens are bytes by default."""
    save_tokenizer(tokenizer or byte_tokenizer(), folder)
    save_pretrained(model, folder, end_of_text=Encoder(folder).end_id)
    write_text(folder / "README.md", "# a model\n")
    write_text(folder / "MLmodel", "flavors: {}\n")
    write_json(folder / "lineage.json", {"recipe": {"model": {"init_from": "a-base"}}})
    return folder


def write_adapted(folder: Path) -> tuple[Path, Path]:
    """A base, and a registered model that was trained on it with an adapter."""
    base = write_registered(small(), folder / "base")
    model = load_pretrained(base)
    adapter = Adapter(kind="lora", rank=4, alpha=8)
    add_adapters(model, chosen_sizes(model, adapter), adapter)
    init_adapters(model, seed=1)
    for number, layer in enumerate(adapted_layers(model).values()):
        layer.lora_b.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    registered = folder / "registered"
    save_adapter(model, registered / "adapter")
    return base, write_registered(model, registered)


def write_pretrained_tokenizer(pattern: str, ignore_merges: bool, folder: Path) -> None:
    """A byte-level BPE that cuts by a known pattern; with `ignore_merges` as Llama 3's.

    Llama 3's begins each text with a token.
    """
    definition = json.loads(train_bpe(["a valve opens"] * 9, 280).to_str())
    definition["model"]["ignore_merges"] = ignore_merges
    split = {"pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Split", **split}, {"type": "ByteLevel", **level}],
    }
    if ignore_merges:
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        }
    write_json(folder / TOKENIZER_FILE, definition)


def tokens() -> torch.Tensor:
    return torch.randint(0, END, (2, CONTEXT), generator=torch.Generator().manual_seed(0))

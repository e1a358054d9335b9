"""export: the time to write each form of a small and of a large model, and the small one's loss.

The small model has a million parameters, is trained briefly on Python's library, and is measured
on 1.3 MB of other files. The large one has the shape of Llama 3.2 1B, in bfloat16 and one file,
with random weights; writing it as bf16 copies it, and so shows the rate of drive and memory.
What is demanded is 20 s for each form, with all imports, and of the large model at most twice the
time of its copy, without imports, which take the same few seconds for a model of any size.
"""

import random
import sysconfig
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand, Limit

VOCABULARY, CONTEXT = 1024, 128
HELD_OUT_BYTES = 1_300_000
STEPS, ROWS = 200, 8
FORMS = ("bf16", "int8", "int4")
SECONDS = 20


def make_data(folder: Path) -> dict[str, Any]:
    """Train the small model, write it beside the documents to measure it on, and the large one."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe
    from pipelines.models.presets import preset
    from pipelines.models.pretrained import save_pretrained
    from pipelines.models.transformer import Transformer

    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(6).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    held: list[str] = []
    while sum(len(text.encode()) for text in held) < HELD_OUT_BYTES:
        held.append(texts.pop())
    tokenizer = train_bpe(texts, VOCABULARY)
    tokens = torch.tensor(tokenizer.encode("".join(texts)).ids)
    model = Transformer(preset("llama-1m").sized(VOCABULARY, CONTEXT))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - CONTEXT, (ROWS,), generator=generator)
        rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        (model(rows[:, :-1], targets_BS=rows[:, 1:]) / (ROWS * CONTEXT)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_tokenizer(tokenizer, folder / "small")
    end = tokenizer.token_to_id("<|endoftext|>")
    save_pretrained(model, folder / "small", end_of_text=end)
    _write_large(folder / "large")
    table = {
        "doc_id": [str(number) for number in range(len(held))],
        "source": ["stdlib"] * len(held),
        "text": held,
        "bytes": [len(text.encode()) for text in held],
    }
    pq.write_table(pa.table(table), folder / "held.parquet")
    return {}


def _write_large(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    weights = {
        name: torch.empty(each.shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, each in model.named_parameters()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


BENCHMARK = Benchmark(
    name="export",
    unit="export",
    measures="seconds",
    contenders=[Contender(form, "export_ours", options={"form": form}) for form in FORMS],
    cases={"small": {"model": "small"}, "large": {"model": "large"}},
    demands=[Demand("bf16", 2, "large", of=form) for form in ("int8", "int4")],
    limits=[Limit("median", SECONDS, of=form) for form in FORMS],
    make_data=make_data,
    warm_up=0,
    pairs=3,
)

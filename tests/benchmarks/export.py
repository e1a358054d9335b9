"""export: the time to write each form of a model of the demo's shape and to measure it, with loss.

The model is the recipe `stdlib-code`'s, trained briefly on Python's library; it is measured on
1.3 MB of other files. There is no baseline: what is demanded is 20 s for each form, imports
included.
"""

import random
import sysconfig
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Limit

VOCABULARY, CONTEXT = 1024, 128  # the recipe's
HELD_OUT_BYTES = 1_300_000
STEPS, ROWS = 200, 8
FORMS = ("bf16", "int8", "int4")
SECONDS = 20


def make_data(folder: Path) -> dict[str, Any]:
    """Train the model and write it beside the documents to measure it on."""
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
    save_tokenizer(tokenizer, folder / "model")
    end = tokenizer.token_to_id("<|endoftext|>")
    save_pretrained(model, folder / "model", end_of_text=end)
    table = {
        "doc_id": [str(number) for number in range(len(held))],
        "source": ["stdlib"] * len(held),
        "text": held,
        "bytes": [len(text.encode()) for text in held],
    }
    pq.write_table(pa.table(table), folder / "held.parquet")
    return {}


BENCHMARK = Benchmark(
    name="export",
    unit="export",
    measures="seconds",
    contenders=[Contender(form, "export_ours", options={"form": form}) for form in FORMS],
    demands=[],
    limits=[Limit("median", SECONDS, of=form) for form in FORMS],
    make_data=make_data,
    warm_up=0,
    pairs=3,
)

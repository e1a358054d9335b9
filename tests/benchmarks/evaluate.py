"""evaluate: our scoring of documents against lm-evaluation-harness's rolling log-likelihood.

The same folder and the same texts, on one core, with the same context. The harness moves on by a
whole window, so ours does: a stride of 1. A document's last window is shorter with us; there the
harness looks back as far as its context reaches, which our smaller strides buy for every window.
So nats agree for documents of one window, which both sides show, and differ for longer ones.

The harness has its model loaded, and the batch with which it is fastest; our rounds load the folder
each time.
"""

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand

SHAPES = {"llama-1m": (1024, 128), "llama-10m": (8192, 512)}  # vocabulary and context
DOCUMENTS = {"llama-1m": 64, "llama-10m": 16}
HARNESS_BATCH = {"llama-1m": 4, "llama-10m": 1}  # its fastest of 1, 4, 16 and 64
MOST_CHARACTERS = 12_000  # of a document
SHORT = 150  # characters that fit into one window of either model
TRAINING_CHARACTERS = 4_000_000  # of the tokenizers


def make_data(folder: Path) -> dict[str, Any]:
    """Write the models, untrained, with tokenizers that were trained on Python's library."""
    from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe
    from pipelines.models.presets import preset
    from pipelines.models.pretrained import save_pretrained
    from pipelines.models.transformer import Transformer

    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > 200]
    random.Random(6).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    # Every second one is short enough for one window, as many of a web corpus are.
    lengths = [MOST_CHARACTERS if number % 2 else SHORT for number in range(len(texts))]
    documents = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    (folder / "documents.json").write_text(json.dumps(documents[: max(DOCUMENTS.values())]))
    for name, (vocabulary, context) in SHAPES.items():
        model = Transformer(preset(name).sized(vocabulary, context))
        model.init_weights(0)
        tokenizer = train_bpe(["".join(texts)[:TRAINING_CHARACTERS]], vocabulary)
        save_tokenizer(tokenizer, folder / name)
        end = tokenizer.token_to_id("<|endoftext|>")
        save_pretrained(model, folder / name, end_of_text=end)
    return {"short": SHORT}


BENCHMARK = Benchmark(
    name="evaluate",
    unit="documents",
    contenders=[
        Contender("penstock", "evaluate_ours"),
        Contender("lm-evaluation-harness", "evaluate_lm_eval"),
    ],
    demands=[Demand(over="lm-evaluation-harness", ratio=1.5)],
    make_data=make_data,
    cases={
        name: {"model": name, "documents": DOCUMENTS[name], "batch": HARNESS_BATCH[name]}
        for name in SHAPES
    },
)

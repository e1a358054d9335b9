"""A model from a file: a Hugging Face folder by our readers, and `torch.load` of the same weights.

Both begin with nothing but the file and end with a decoder that is ready on the device: the usual
way makes the model, loads a state dict and copies it in. `torch_load_empty` spares it what
`nn.Module`s draw at random when they are made. The file is in the page cache.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand

SHAPE = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "kv_heads": 12,
    "hidden": 2048,
    "vocab_size": 8192,
    "context_length": 256,
}


def make_data(folder: Path) -> dict[str, Any]:
    """The same random weights, some 400 MB, in both formats."""
    import torch

    from pipelines.models.config import DecoderConfig
    from pipelines.models.pretrained import save_pretrained
    from pipelines.models.transformer import Transformer

    model = Transformer(DecoderConfig(**SHAPE))
    model.init_weights(seed=0)
    save_pretrained(model, folder / "folder")
    torch.save(model.state_dict(), folder / "weights.pt")
    return {"shape": SHAPE, "folder": "folder", "file": "weights.pt"}


BENCHMARK = Benchmark(
    name="load",
    unit="bytes",
    contenders=[
        Contender("penstock", "load_ours"),
        Contender("torch_load", "load_torch", options={"empty": False}),
        Contender("torch_load_empty", "load_torch", options={"empty": True}),
    ],
    demands=[Demand(over="torch_load", ratio=3)],
    make_data=make_data,
)

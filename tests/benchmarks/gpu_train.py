"""Training on one GPU: GPT-2 124M and a Llama of 1B, bf16 and compiled, against Hugging Face's.

Both compile and use fused AdamW; Hugging Face's attention is PyTorch's (`sdpa`). MFU, in Penstock's
figures, is over the device's datasheet: 989 TFLOP/s dense in bf16 of an H100 or H200. A round is a
run from new weights, the first one, which compiles, does not count. It needs torch and
transformers, beside what Penstock itself needs.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.models.presets import preset
from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.loader import VOCABULARY, write_split

TOKENS = 50_000_000
TRAIN = {
    "warmup_steps": 5,
    "lr": 1e-4,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "precision": "bf16",
    "log_every": 10,
    "checkpoint_every": 100_000,
}


def make_data(folder: Path) -> dict[str, Any]:
    """Random ids; each of the models has them in its vocabulary."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and this machine has none")
    split = write_split(folder, TOKENS, VOCABULARY)
    return {"split": split.model_dump(mode="json"), "device": "cuda"}


def case(shape: dict[str, Any], micro_batch: int, batch: int, **train: Any) -> dict[str, Any]:
    """Options: a shape, and samples at once and a step."""
    sizes = {"micro_batch_size": micro_batch, "global_batch_size": batch, "steps": 20}
    return {"shape": shape, "train": TRAIN | sizes | train}


def shape_of(name: str, length: int, **changes: Any) -> dict[str, Any]:
    """A preset's, with another context."""
    return asdict(preset(name)) | {"context_length": length} | changes


BENCHMARK = Benchmark(
    name="gpu_train",
    unit="tokens",
    contenders=[
        Contender("penstock", "train_ours", options={"name": "train", "compile": True}),
        Contender("hf trainer", "train_huggingface", options={"compile": True}),
    ],
    demands=[Demand(over="hf trainer", ratio=1.15)],
    make_data=make_data,
    cases={
        "gpt2-124m": case(shape_of("gpt2-124m", 1024, vocab_size=50_304), 32, 64),
        "llama-1b": case(shape_of("llama-1b", 2048), 8, 16),
    },
)

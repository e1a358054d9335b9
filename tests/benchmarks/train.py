"""Training one small Llama on the CPU with two threads: tokens a second, without checkpoints.

All do the same work on the same token shard: fp32, 8 samples of 256 tokens a step, AdamW (fused),
the gradient clipped to norm 1, warm-up and cosine, a log line every 10 steps. Penstock's model
predicts 256 tokens of a sample, Hugging Face's 255 of the same 256. A round is a run from new
weights; what is compiled is kept from one round to the next, and compiled in the one that does not
count.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.loader import write_split

TOKENS = 2_000_000
SHAPE = {
    "layers": 6,
    "width": 256,
    "heads": 8,
    "kv_heads": 4,
    "hidden": 688,
    "vocab_size": 4096,
    "context_length": 256,
}
TRAIN = {
    "steps": 20,
    "warmup_steps": 5,
    "lr": 1e-3,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "log_every": 10,
    "checkpoint_every": 1000,
}


def make_data(folder: Path) -> dict[str, Any]:
    """Random ids."""
    return {
        "split": write_split(folder, TOKENS, SHAPE["vocab_size"]).model_dump(mode="json"),
        "shape": SHAPE,
        "train": TRAIN,
        "threads": 2,
        "device": "cpu",
    }


BENCHMARK = Benchmark(
    name="train",
    unit="tokens",
    contenders=[
        Contender("penstock", "train_ours", options={"name": "compiled", "compile": True}),
        Contender("penstock eager", "train_ours", options={"name": "eager", "compile": False}),
        Contender("hf trainer", "train_huggingface", options={"compile": False}),
        Contender("hf trainer compiled", "train_huggingface", options={"compile": True}),
    ],
    demands=[
        Demand(over="hf trainer", ratio=1.3),
        Demand(over="hf trainer compiled", ratio=1.0),
        Demand(of="penstock eager", over="hf trainer", ratio=1.0),
    ],
    make_data=make_data,
)

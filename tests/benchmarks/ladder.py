"""One small Llama, one saving after the other: tokens a second, and peak memory of a process.

Peak memory is exact: with a GPU what its allocator says, and on the CPU the running sum of what
PyTorch's allocator gives and takes back, from before the model is made to the end of the second
step. So it holds weights, gradients, moments, activations and what is computed with. Each rung also
measures the rung before it, and ends the benchmark where it does not save the share that it
promises. Rungs of several processes are measured in the first one, over gloo. There is no rung for
offload: it moves bytes from a GPU to the host's memory, and on a CPU both are one.
"""

from pathlib import Path
from typing import Any

import torch

from pipelines.core.machine import has_cuda_driver
from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.loader import write_split

TOKENS = 1_000_000
SHAPE = {
    "layers": 6,
    "width": 384,
    "heads": 6,
    "kv_heads": 6,
    "hidden": 1024,
    "vocab_size": 4096,
    "context_length": 256,
}
TRAIN = {
    "steps": 4,
    "warmup_steps": 1,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "log_every": 4,
    "checkpoint_every": 1000,
}
Options = dict[str, Any]


def make_data(folder: Path) -> Options:
    """Random ids."""
    split = write_split(folder, TOKENS, SHAPE["vocab_size"])
    return {"split": split.model_dump(mode="json"), "shape": SHAPE, "train": TRAIN, "threads": 2}


def rung(
    before: Contender | None, name: str, saves: float = 0.0, world: int = 1, **changes: Any
) -> Contender:
    """A contender.

    Args:
        before: The rung that it is measured against.
        name: Its own.
        saves: Share of that rung's peak memory that it must save; below 0, that it may need more.
        world: Processes.
        changes: Of the rung before: sections of the recipe, or `fused`.
    """
    kept: Options = dict(before.options["recipe"]) if before else {}
    for section, values in changes.items():
        kept[section] = {**kept.get(section, {}), **values}
    options: Options = {"name": name, "recipe": kept, "world": world, "saves": saves}
    if before is not None:
        options["before"] = {key: before.options[key] for key in ("name", "recipe", "world")}
    return Contender(name, "ladder_ours", options=options)


FP32 = rung(None, "fp32", optimizer={"fused": False})
BF16 = rung(FP32, "bf16", 0.05, train={"precision": "bf16"})
FUSED = rung(BF16, "+ fused optimizer", -0.001, optimizer={"fused": True})
EIGHT_BITS = rung(FUSED, "8-bit moments", 0.1, train={"optimizer": "adamw_8bit"})
COMPILED = rung(FUSED, "+ compile", 0.05, train={"compile": True})
ACCUMULATION = rung(COMPILED, "+ accumulation", 0.19, train={"micro_batch_size": 2})
SELECTIVE = rung(ACCUMULATION, "+ selective", train={"activation_checkpoint": "selective"})
FULL = rung(SELECTIVE, "+ full", 0.02, train={"activation_checkpoint": "full"})
DDP = rung(FUSED, "ddp", world=2, train={"micro_batch_size": 1})
ZERO_1 = rung(DDP, "zero 1", 0.1, 2, parallel={"sharding": "optimizer"})
ZERO_2 = rung(ZERO_1, "zero 2", 0.1, 2, parallel={"sharding": "gradients"})
ZERO_3 = rung(ZERO_2, "zero 3", 0.02, 2, parallel={"sharding": "full"})
LORA = rung(FUSED, "lora", 0.1, adapter={"kind": "lora"})
QLORA = rung(LORA, "qlora", 0.02, adapter={"kind": "qlora"})
RUNGS = [FP32, BF16, FUSED, EIGHT_BITS, COMPILED, ACCUMULATION, SELECTIVE, FULL]
RUNGS += [DDP, ZERO_1, ZERO_2, ZERO_3, LORA, QLORA]
# On a GPU only: a CPU has no FlexAttention and no FlashAttention to compare. The backward pass of
# the second needs memory for 128 tokens more of each document, and sums in fp32.
DOCUMENTS = {"optimizer": {"fused": True}, "data": {"document_mask": True}}
FLEX = rung(None, "documents", train={"precision": "bf16", "attention": "flex"}, **DOCUMENTS)
VARLEN = rung(FLEX, "+ varlen", -0.1, train={"attention": "varlen"})
# Nor does it save anything by paging within its own memory.
PAGED = rung(FUSED, "paged moments", 0.1, parallel={"paged_moments": True})
ON_GPU = [PAGED, FLEX, VARLEN] if has_cuda_driver() else []
# From compute capability 10.0 on. It saves no memory: a product's factors lie beside their copies.
MXFP8 = rung(COMPILED, "+ mxfp8", -0.1, train={"precision": "fp8", "fp8_scaling": "mx"})
_HAS_MX = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
BLOCKS_OF_32 = [MXFP8] if _HAS_MX else []

BENCHMARK = Benchmark(
    name="ladder",
    unit="tokens",
    contenders=RUNGS + ON_GPU + BLOCKS_OF_32,
    demands=[
        Demand(of="+ fused optimizer", over="bf16", ratio=1.0),
        Demand(of="+ varlen", over="documents", ratio=1.0),
    ],
    make_data=make_data,
)

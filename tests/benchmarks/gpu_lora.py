"""LoRA and QLoRA of a model with the shape of Llama 3 8B and random weights, on one GPU.

Samples of 4096 tokens, two at once; adapters of rank 16 beside every linear layer of a block, on
frozen weights in bf16 (LoRA) or NF4 (QLoRA); all blocks are computed again in the backward pass.
"""

from tests.benchmarks.gpu_train import case, make_data, shape_of
from tests.benchmarks.harness import Benchmark, Contender, Demand

LORA = {"kind": "lora", "rank": 16, "alpha": 32.0}
OPTIONS = {"name": "lora", "compile": True, "lora": LORA}
QLORA = OPTIONS | {"name": "qlora", "lora": LORA | {"kind": "qlora"}}

BENCHMARK = Benchmark(
    name="gpu_lora",
    unit="tokens",
    contenders=[
        Contender("penstock", "train_ours", options=OPTIONS),
        Contender("penstock qlora", "train_ours", options=QLORA),
        Contender("peft", "train_huggingface", options={"compile": False, "lora": LORA}),
    ],
    demands=[
        Demand(over="peft", ratio=1.2),
        Demand(of="penstock qlora", over="penstock", ratio=0.8),
    ],
    make_data=make_data,
    cases={
        "8b": case(shape_of("llama3-8b", 4096), 2, 4, steps=10, activation_checkpoint="full"),
    },
)

"""What a precision gains on one GPU.

bf16 is compared with fp32 and TF32 on a 1B Llama, and fp8 with bf16 on wider layers.

fp8 is measured on eight layers of Llama 3 8B's shape: so many can be trained in full on one GPU.
"""

from tests.benchmarks.gpu_train import TRAIN, case, make_data, shape_of
from tests.benchmarks.harness import Benchmark, Contender, Demand

WIDE = case(shape_of("llama3-8b", 4096, layers=8), 2, 4)
SMALL = case(shape_of("llama-1b", 2048), 4, 8)


def contender(precision: str, sizes: dict[str, object]) -> Contender:
    """Ours, in a precision."""
    name = f"{precision} {'wide' if sizes is WIDE else '1b'}"
    train = TRAIN | sizes["train"] | {"precision": precision}  # type: ignore[operator]
    options = {**sizes, "train": train, "name": name.replace(" ", "-"), "compile": True}
    return Contender(name, "train_ours", options=options)


BENCHMARK = Benchmark(
    name="gpu_precision",
    unit="tokens",
    contenders=[
        contender("fp32", SMALL),
        contender("tf32", SMALL),
        contender("bf16", SMALL),
        contender("bf16", WIDE),
        contender("fp8", WIDE),
    ],
    demands=[
        Demand(of="bf16 1b", over="fp32 1b", ratio=2),
        Demand(of="bf16 1b", over="tf32 1b", ratio=1.3),
        Demand(of="fp8 wide", over="bf16 wide", ratio=1.15),
    ],
    make_data=make_data,
)

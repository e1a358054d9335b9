"""Bytes from a file to a GPU, by each reader: as a checkpoint or a model's weights are read.

The page cache is emptied of the file before each round. `drive` reads into host memory with
O_DIRECT and eight threads and copies nowhere: what the drive itself gives.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.page_cache import empty_cache

FILE = "weights.bin"
FILE_BYTES = 8 << 30
TENSOR_BYTES = 256 << 20


def make_data(folder: Path) -> dict[str, Any]:
    """A file of random bytes."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu_readers needs a CUDA GPU, and this machine has none")
    return write_file(folder, FILE_BYTES, TENSOR_BYTES, "cuda")


def write_file(folder: Path, size: int, tensor: int, device: str) -> dict[str, Any]:
    """A file of as many tensors, and the contenders' options."""
    rng = np.random.default_rng(0)
    with (folder / FILE).open("wb") as file:
        for _ in range(size // tensor):
            file.write(rng.bytes(tensor))
        os.fsync(file.fileno())
    return {"file": FILE, "bytes": size, "tensor_bytes": tensor, "device": device}


BENCHMARK = Benchmark(
    name="gpu_readers",
    unit="bytes",
    contenders=[
        Contender("mmap", "gpu_readers_ours", options={"reader": "mmap"}),
        Contender("pinned", "gpu_readers_ours", options={"reader": "pinned"}),
        Contender("gds", "gpu_readers_ours", options={"reader": "gds"}),
        Contender("memmap", "gpu_readers_memmap"),
        Contender("drive", "gpu_readers_drive"),
    ],
    demands=[
        Demand(of="pinned", over="memmap", ratio=3),
        Demand(of="pinned", over="drive", ratio=0.9),
        Demand(of="gds", over="drive", ratio=0.9),
    ],
    make_data=make_data,
    before_round=empty_cache,
)

"""`get_batch` as nanoGPT's train.py does it: a memory map, random offsets, a stack of copies."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(1)
    batch, sequence = options["batch"], options["sequence"]

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        # Mapped anew each time, as there: a map that is kept is said to leak memory.
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - sequence, (batch,))
        x = torch.stack([torch.from_numpy(data[i : i + sequence].astype(np.int64)) for i in starts])
        y = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + sequence].astype(np.int64)) for i in starts]
        )
        return x, y

    def run_round() -> float:
        return sum(get_batch()[0].numel() for _ in range(options["batches"]))

    return run_round


if __name__ == "__main__":
    serve(prepare)

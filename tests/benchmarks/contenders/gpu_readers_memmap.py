"""`np.memmap` and `.to(device)`, tensor after tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    device = torch.device(options["device"])
    size = options["tensor_bytes"]

    def run_round() -> float:
        data = np.memmap(folder / options["file"], dtype=np.uint8, mode="c")
        for offset in range(0, options["bytes"], size):
            torch.from_numpy(data[offset : offset + size]).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return options["bytes"]

    return run_round


if __name__ == "__main__":
    serve(prepare)

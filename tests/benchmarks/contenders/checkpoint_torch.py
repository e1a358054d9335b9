"""`torch.save` of weights and moments, while training waits; what is in the page cache will do."""

import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.small_training import Training


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    training = Training(options)

    def run_round() -> tuple[float, dict[str, Any]]:
        alone = training.step()
        began = time.perf_counter()
        state = {
            "model": training.decoder.state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }
        torch.save(state, folder / "torch.pt")
        stalled = time.perf_counter() - began
        return 1, {"seconds": stalled, "stall_seconds": stalled, "step_seconds": alone}

    return run_round


if __name__ == "__main__":
    serve(prepare)

"""A Hugging Face folder, each tensor read straight into its place."""

from pathlib import Path
from typing import Any

import torch

from pipelines.models.pretrained import load_pretrained
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def run_round() -> float:
        model = load_pretrained(folder / options["folder"], device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return sum(each.nbytes for each in model.parameters())

    return run_round


if __name__ == "__main__":
    serve(prepare)

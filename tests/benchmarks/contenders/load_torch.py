"""The usual way: make the model, `torch.load` a state dict, copy it in."""

from pathlib import Path
from typing import Any

import torch

from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = DecoderConfig(**options["shape"])

    def run_round() -> float:
        with torch.device("meta" if options["empty"] else device):
            model = Transformer(config)
        if options["empty"]:
            model.to_empty(device=device)
            model.after_to_empty()
        model.load_state_dict(torch.load(folder / options["file"], map_location=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return sum(each.nbytes for each in model.parameters())

    return run_round


if __name__ == "__main__":
    serve(prepare)

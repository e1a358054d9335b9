"""Penstock's Trainer, its blocks compiled or not."""

from pathlib import Path
from typing import Any

import torch

from pipelines.core.records import Split
from pipelines.models.config import DecoderConfig
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.our_trainer import build_trainer


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(options["threads"])
    split = Split.model_validate(options["split"])
    train = options["train"] | {"compile": options["compile"]}
    shape = DecoderConfig(**options["shape"])
    scratch = f"ours-compiled-{options['compile']}"

    def run_round() -> tuple[float, dict[str, Any]]:
        built = build_trainer(folder, split, shape, {"train": train}, scratch=scratch)
        built.trainer.fit()
        last = built.points[-1]
        return last.tokens, {"loss": last.loss, "parameters": built.model.parameter_count}

    return run_round


if __name__ == "__main__":
    serve(prepare)

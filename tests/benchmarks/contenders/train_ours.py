"""Penstock's Trainer, its blocks compiled or not."""

import shutil
from pathlib import Path
from typing import Any

import torch

from pipelines.models.config import DecoderConfig
from pipelines.run.records import Split
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.our_trainer import build_trainer, free


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    device = torch.device(options["device"])
    if device.type == "cpu":
        torch.set_num_threads(options["threads"])
    split = Split.model_validate(options["split"])
    sections = {"train": options["train"] | {"compile": options["compile"]}}
    if "lora" in options:
        sections["adapter"] = options["lora"]
    shape = DecoderConfig(**options["shape"])
    scratch = "-".join(["ours", options["name"]])

    def run_round() -> tuple[float, dict[str, Any]]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        built = build_trainer(folder, split, shape, sections, device, scratch)
        built.trainer.fit()
        last = built.points[-1]
        figures = {
            "loss": last.loss,
            "parameters": built.model.parameter_count,
            "mfu": last.mfu,
            "peak_gib": last.memory_bytes / 2**30 if device.type == "cuda" else 0.0,
        }
        del built
        free(device)
        shutil.rmtree(folder / scratch)
        return last.tokens, figures

    return run_round


if __name__ == "__main__":
    serve(prepare)

"""Penstock's token loader, with the reader that `auto` chooses."""

from pathlib import Path
from typing import Any

import torch

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.run.records import Split
from tests.benchmarks.contender import Round, serve

GLOBAL_BATCH = 512


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(1)
    split = Split.model_validate(options["split"])
    dataset = TokenDataset(folder, split, options["sequence"])
    micro_batches = GLOBAL_BATCH // options["batch"]
    step = 0

    def build() -> TokenLoader:
        return TokenLoader(
            dataset,
            seed=1,
            global_batch=GLOBAL_BATCH,
            micro_batch=options["batch"],
            dp_rank=0,
            dp_world=1,
            device=torch.device("cpu"),
        )

    kept = build()

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal step
        # What one has mapped can't be dropped from the page cache: where cold, a new one.
        loader = build() if options["cold"] else kept
        tokens = 0
        for _ in range(options["batches"] // micro_batches):
            for batch, _last in loader.micro_batches(step):
                tokens += batch.inputs_BS.numel()
            step += 1
        return tokens, {"reader": loader.reader.name}

    return run_round


if __name__ == "__main__":
    serve(prepare)

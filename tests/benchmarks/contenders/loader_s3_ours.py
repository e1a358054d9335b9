"""Penstock's token loader on a remote in S3, without a place in its cache."""

import os
from pathlib import Path
from typing import Any

import torch

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.sources.shard_cache import FOLDER_VARIABLE, SIZE_VARIABLE
from pipelines.loading.token_dataset import TokenDataset
from pipelines.run.records import Split
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.loader_s3_boto3 import CREDENTIALS

CACHE_GB = 0.01  # the indexes, but no shard


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=options["endpoint"])
    os.environ.update({FOLDER_VARIABLE: str(folder / "cache"), SIZE_VARIABLE: str(CACHE_GB)})
    torch.set_num_threads(1)
    split = Split.model_validate(options["split"])
    dataset = TokenDataset(
        folder / "absent",
        split,
        options["sequence"],
        reader="object_store",
        remote="s3://bench",
    )
    reader = dataset.open(torch.device("cpu"))  # the shards are verified here, once
    dataset.open = lambda _device: reader
    step = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal step
        loader = TokenLoader(
            dataset,
            seed=1,
            global_batch=options["batch"] * options["batches"],
            micro_batch=options["batch"],
            dp_rank=0,
            dp_world=1,
            device=torch.device("cpu"),
            steps=step + 1,  # nothing is read ahead for the next round
        )
        tokens = sum(batch.inputs_BS.numel() for batch, _ in loader.micro_batches(step))
        step += 1
        return tokens, {"reader": reader.name, "latency_seconds": options["latency_seconds"]}

    return run_round


if __name__ == "__main__":
    serve(prepare)

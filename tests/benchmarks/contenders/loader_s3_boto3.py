"""One `get_object` of a sample's range after the other, by boto3."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.contender import Round, serve

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_TOKEN_BYTES = 2


def prepare(_folder: Path, options: dict[str, Any]) -> Round:
    import os

    import boto3
    import torch

    os.environ.update(CREDENTIALS)
    client = boto3.client("s3", endpoint_url=options["endpoint"])
    keys, sequence = options["keys"], options["sequence"]
    a_shard = (options["shard_tokens"] - 1) // sequence
    order = iter(np.random.default_rng(1).permutation(a_shard * len(keys)))

    def read_sample() -> np.ndarray:
        shard, number = divmod(int(next(order)), a_shard)
        first = number * sequence * _TOKEN_BYTES
        last = first + (sequence + 1) * _TOKEN_BYTES - 1
        answer = client.get_object(Bucket="bench", Key=keys[shard], Range=f"bytes={first}-{last}")
        return np.frombuffer(answer["Body"].read(), np.uint16)

    def run_round() -> float:
        tokens = 0
        for _ in range(options["batches"]):
            rows = np.stack([read_sample() for _ in range(options["batch"])]).astype(np.int64)
            batch = torch.from_numpy(rows)
            tokens += batch[:, :-1].numel()
        return tokens

    return run_round


if __name__ == "__main__":
    serve(prepare)

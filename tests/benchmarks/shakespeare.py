"""Seconds on the CPU to a validation loss of 1.88 nats a character of Shakespeare.

Text, split (the first 90% to train on), block of 64 and batch of 12 are those of nanoGPT's small
setting for a CPU. `nanogpt` is a plain loop of 2000 steps with its hyper-parameters, whose loss at
the end is 1.88. Penstock runs its recipe `shakespeare-char`: another model with no more parameters,
and fewer steps, whose number is fixed in the recipe. A round is a run from new weights with the
next seed, and ends with the loss over the whole validation split, once; all of it is timed.

The text is not fetched: SHAKESPEARE_TEXT names the file, 1,115,394 bytes that are known as
"tinyshakespeare".
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.run.records import Split
from tests.benchmarks.harness import Benchmark, Contender, Demand

VARIABLE = "SHAKESPEARE_TEXT"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LOSS = 1.88
BLOCK, BATCH = 64, 12


def make_data(folder: Path) -> dict[str, Any]:
    """Characters as ids: a token shard to train on, and a plain file to validate on."""
    text = _text()
    characters = sorted(set(text))
    number = {character: at for at, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], dtype=np.uint16)
    train, validation = np.split(ids, [int(0.9 * len(ids))])
    train.tofile(folder / "train.bin")
    validation.tofile(folder / "validation.bin")
    writer = ShardWriter(folder / "train-00000", len(characters))
    writer.add(train)
    shard = writer.close()
    split = Split(documents=1, bytes=len(train), tokens=len(train), shards=(shard,))
    return {
        "split": split.model_dump(mode="json"),
        "vocabulary": len(characters),
        "block": BLOCK,
        "batch": BATCH,
        "loss": LOSS,
        "threads": 2,
    }


def _text() -> str:
    path = os.environ.get(VARIABLE)
    if path is None or not Path(path).is_file():
        raise SystemExit(f"{VARIABLE}={path}: no such file; it must name tinyshakespeare's text")
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit(f"{VARIABLE}={path}: not tinyshakespeare, whose SHA-256 is {SHA256}")
    return content.decode()


BENCHMARK = Benchmark(
    name="shakespeare",
    unit="runs",
    contenders=[
        Contender("penstock", "shakespeare_ours"),
        Contender("nanogpt", "shakespeare_nanogpt"),
    ],
    demands=[Demand(over="nanogpt", ratio=1 / 0.7)],
    make_data=make_data,
    warm_up=0,  # a run is long, and compiles nothing
)

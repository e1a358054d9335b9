"""Tensor parallelism on GPUs of one host, with `parallel.async_tp` and without."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pipelines.models.config import DecoderConfig
from pipelines.parallel.process_group import process_group
from pipelines.run.records import Split
from tests.benchmarks.contenders.our_trainer import build_trainer, free
from tests.benchmarks.loader import write_split
from tests.gpu_acceptance.acceptance_parts import HERE, Outcome, Place
from tests.gpu_acceptance.training_speed import WIDE, sized

_STEPS = 12  # in three windows, of which the first compiles
_SAME = 1e-2  # of losses in bf16, whose sums are made in another order
_MOST = 8  # processes, as many as the model has key-value heads


def async_tp(place: Place) -> Outcome:
    """Tokens a second over those without it, with the same losses; a CPU has it in neither.

    Raises:
        ValueError: the losses differ.
    """
    gpus = 2 if place.fake else torch.cuda.device_count()
    world = min(_MOST, 1 << (gpus.bit_length() - 1))
    apart, overlapped = _run(place, world)
    pairs = zip(apart["losses"], overlapped["losses"], strict=True)
    furthest = max(abs(theirs / ours - 1) for ours, theirs in pairs)
    if not furthest <= _SAME:
        raise ValueError(f"parallel.async_tp: losses differ by {furthest:.1e}, not at most {_SAME}")
    rate, ratio = overlapped["rate"], overlapped["rate"] / apart["rate"]
    limits = f"tp {world}; losses within {furthest:.1e}; without it {apart['rate']:,.0f} tokens/s"
    detail = {"apart": apart, "overlapped": overlapped}
    return Outcome(rate, "tokens/s", ratio, ratio > 1, limits, detail)


def _run(place: Place, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return losses and rate without `parallel.async_tp`, and with it."""
    work = sized(place, WIDE, _STEPS)
    shape, train = DecoderConfig(**work["shape"]), work["train"]
    tokens = (train["steps"] + 1) * train["global_batch_size"] * (shape.context_length + 1)
    split = write_split(place.folder, tokens, min(shape.vocab_size, 30_000))
    both = [
        {"train": train, "parallel": {"tp": world, "async_tp": on and not place.fake}}
        for on in (False, True)
    ]
    given = {"split": split.model_dump(), "shape": work["shape"], "both": both}
    (place.folder / "given.json").write_text(json.dumps(given))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, "-m", *launcher, "-m", f"{HERE}.async_tp", str(place.folder)]
    subprocess.run(command, check=True)
    apart, overlapped = json.loads((place.folder / "found.json").read_text())
    return apart, overlapped


def one_rank(folder: Path) -> None:
    """Train as one of torchrun's processes; the first writes losses and the warm windows' rate."""
    given = json.loads((folder / "given.json").read_text())
    split, shape = Split.model_validate(given["split"]), DecoderConfig(**given["shape"])
    found = []
    with process_group() as device:
        for sections in given["both"]:
            built = build_trainer(folder, split, shape, sections, device)
            built.trainer.fit()
            rate = statistics.median(point.tokens_per_second for point in built.points[1:])
            found.append({"losses": [point.loss for point in built.points], "rate": rate})
            del built
            free(device)
        if os.environ["RANK"] == "0":
            (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))

"""The GPU computes what the CPU does, a resumed run what an unbroken one does, and many one's."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipelines.doctor.all_reduce import Group, reduced
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.process_group import process_group
from pipelines.run.records import Split
from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
from pipelines.training.checkpoint.state import state_of
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.metrics import StepMetrics
from tests.benchmarks import train
from tests.benchmarks.contenders.our_trainer import Built, build_trainer
from tests.benchmarks.gpu_train import shape_of
from tests.benchmarks.loader import write_split
from tests.gpu_acceptance.acceptance_parts import HERE, Outcome, Place
from tests.gpu_acceptance.training_speed import GPT2, TINY, measured, sized

_WITHIN = 1e-4
_TOKENS = 500_000
_STEPS, _SAVED, _CUT = 6, 3, 5
_FP32 = train.TRAIN | {"log_every": 1}
_SHAPE = train.SHAPE | {"vocab_size": 512, "layers": 2}  # a CPU takes its 20 steps in seconds


def losses(place: Place) -> Outcome:
    """The losses of 20 fp32 steps on the device beside those on the CPU.

    The fake device is the CPU, where the same sums are made in another order.
    """
    split = write_split(place.folder, _TOKENS, 512)
    drawn = Transformer(_shape(place.fake))  # on the CPU: from one seed a GPU draws other numbers
    drawn.init_weights(seed=0)
    expected = train_losses(place, split, "cpu", _FP32, drawn)
    other = {"micro_batch_size": 4} if place.fake else {}
    found = train_losses(place, split, place.device, _FP32 | other, drawn)
    return compare(expected, found)


def compare(expected: list[float], found: list[float], more: str = "") -> Outcome:
    """The largest relative difference of two curves; `more` is said beside it."""
    pairs = zip(expected, found, strict=True)
    differences = [abs(theirs / ours - 1) for ours, theirs in pairs]
    # What is no number is the worst of all, where `max` alone would pass it over.
    worst = max(differences, key=lambda each: (not math.isfinite(each), each))
    step = differences.index(worst) + 1
    curves = {"expected": expected, "found": found}
    limits = f"step {step} of {len(found)}{more}"
    return Outcome(worst, "relative", worst / _WITHIN, worst <= _WITHIN, limits, curves)


def train_losses(
    place: Place,
    split: Split,
    device: str,
    values: dict[str, Any],
    begin: Transformer | None = None,
) -> list[float]:
    """Each step's loss, with the weights of `begin` at first; by default the device draws them."""
    sections = {"train": values}
    built = build_trainer(place.folder, split, _shape(place.fake), sections, torch.device(device))
    if begin is not None:
        built.model.load_state_dict(begin.state_dict())
    built.trainer.fit()
    return [point.loss for point in built.points]


def _shape(fake: bool) -> DecoderConfig:
    return DecoderConfig(**(TINY if fake else _SHAPE))


def resume(place: Place) -> Outcome:
    """Weights, moments, losses and norms after a break beside those without one; save and load.

    Before the break the moments are paged, which changes no bit either.
    """
    split = write_split(place.folder, _TOKENS, 512)
    whole = _resumable(place, split, "whole")
    whole.trainer.fit()
    cut = _resumable(place, split, "cut", paged_moments=True)
    cut.trainer.report = _stopped
    with suppress(InterruptedError):
        cut.trainer.fit()
    again = _resumable(place, split, "cut")
    again.trainer.fit()
    different = differing(whole, again)
    rates = _save_and_load(place, whole)
    limits = f"save {rates['save_gb_s']:.2f} GB/s, load {rates['load_gb_s']:.2f} GB/s"
    detail = {"different": different, **rates}
    return Outcome(len(different), "differ", None, not different, limits, detail)


def copies(place: Place) -> Outcome:
    """A broken run goes on from a copy in memory to the same bits; what a copy a step costs it."""
    plain = place.result_of("gpt2")["detail"]["step_seconds"]
    copied = measured(place, sized(place, GPT2, 12, copy_every=1))["step_seconds"]
    split = write_split(place.folder, _TOKENS, 512)
    seldom = {"checkpoint_every": _STEPS}
    whole = _resumable(place, split, "whole", **seldom)
    whole.trainer.fit()
    cut = _resumable(place, split, "cut", copy_every=1, **seldom)
    cut.trainer.report = _stopped
    with suppress(InterruptedError):
        cut.trainer.fit()
    cut.trainer.checkpoints.before_sums(_CUT)  # nothing else writes beside the next run
    again = _resumable(place, split, "cut", copy_every=1, **seldom)
    again.trainer.fit()
    lost = _CUT + 1 - again.points[0].step
    different = differing(whole, again)
    told = f"lost {lost} step; a step of GPT-2 takes {copied:.3f} s, without copies {plain:.3f} s"
    detail = {"different": different, "lost": lost, "step_seconds": {"0": plain, "1": copied}}
    reached = not different and lost <= 1
    return Outcome(len(different), "differ", plain / copied, reached, told, detail)


def _stopped(point: StepMetrics) -> None:
    if point.step == _CUT:
        raise InterruptedError


def _resumable(
    place: Place, split: Split, scratch: str, *, paged_moments: bool = False, **train: int
) -> Built:
    shape = TINY if place.fake else shape_of("gpt2-124m", 1024)
    values = {
        "steps": _STEPS,
        "checkpoint_every": _SAVED,
        "deterministic": True,
        "precision": "fp32" if place.fake else "bf16",
        "micro_batch_size": 4,
    }
    sections = {"train": _FP32 | values | train, "parallel": {"paged_moments": paged_moments}}
    device = torch.device(place.device)
    config = DecoderConfig(**shape)
    return build_trainer(place.folder, split, config, sections, device, scratch, saves=True)


def differing(whole: Built, again: Built) -> list[str]:
    """What is not the same to the bit in two runs, the second of which was resumed."""
    points = [[(p.step, p.loss, p.gradient_norm) for p in run.points] for run in (whole, again)]
    names = [] if points[0][-len(points[1]) :] == points[1] else ["losses and norms"]
    ours, theirs = (state_of(run.trainer.model, run.trainer.optimizer) for run in (whole, again))
    return names + [name for name in ours if not torch.equal(ours[name], theirs[name])]


def _save_and_load(place: Place, built: Built) -> dict[str, float]:
    trainer = built.trainer
    store = CheckpointStore(place.folder / "timed")
    checkpoints = Checkpoints(store, trainer.model, trainer.optimizer)
    seconds = []
    for work in (lambda: (checkpoints.save(Position(1)), checkpoints.wait()), checkpoints.restore):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    files = (place.folder / "timed").rglob("*")
    size = sum(each.stat().st_size for each in files if each.is_file())
    save, load = (size / 1e9 / each for each in seconds)
    return {"bytes": size, "save_gb_s": save, "load_gb_s": load}


def ranks(place: Place) -> Outcome:
    """Losses of all GPUs together, fully sharded, beside one's; and what an all-reduce carries.

    The fake has two processes and gloo.
    """
    world = 2 if place.fake else torch.cuda.device_count()
    split = write_split(place.folder, _TOKENS, 512)
    batch = {"global_batch_size": 8 * world, "micro_batch_size": 8}
    expected = train_losses(place, split, place.device, _FP32 | batch)
    (place.folder / "ranks.json").write_text(json.dumps({"split": split.model_dump(), **batch}))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, "-m", *launcher, "-m", f"{HERE}.same_numbers"]
    subprocess.run([*command, str(place.folder), str(int(place.fake))], check=True)
    found = json.loads((place.folder / "losses.json").read_text())
    meeting = f"file://{place.folder / 'store'}"
    group = Group(address=meeting, world=world, first=0, here=world, on_gpu=not place.fake)
    bandwidth = reduced(group, 600 if place.fake else 30).bandwidth
    return compare(expected, found, f"; {group.backend} bus {bandwidth / 1e9:.1f} GB/s")


def one_rank(folder: Path, fake: bool) -> None:
    """Train as one of torchrun's processes; the first writes the losses."""
    given = json.loads((folder / "ranks.json").read_text())
    split = Split.model_validate(given.pop("split"))
    with process_group() as device:
        sections = {"train": _FP32 | given, "parallel": {"sharding": "full"}}
        built = build_trainer(folder, split, _shape(fake), sections, device)
        built.trainer.fit()
        if os.environ["RANK"] == "0":
            told = json.dumps([point.loss for point in built.points])
            (folder / "losses.json").write_text(told)


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]), sys.argv[2] == "1")

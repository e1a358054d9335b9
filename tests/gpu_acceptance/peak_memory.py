"""The allocator's peak beside the dry run's, and what each saving of the ladder is worth.

The dry run knows one version of torch, and a GPU's machine may have another. So its figures are in
`predicted.json`, which `python -m tests.gpu_acceptance.peak_memory` writes; they are older than any
measurement.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipelines.core.storage import read_json, write_json
from pipelines.models.config import DecoderConfig
from pipelines.training.checkpoint.checkpointer import Position
from pipelines.training.dry_run.dry_run import dry_run
from tests.benchmarks import ladder as benchmark
from tests.benchmarks.contenders import ladder_ours
from tests.benchmarks.contenders.our_trainer import build_trainer, free
from tests.benchmarks.loader import write_split
from tests.gpu_acceptance.acceptance_parts import Outcome, Place
from tests.gpu_acceptance.training_speed import TINY
from tests.unit.training.dry_run.dry_run_cases import FURTHER, QUICK, SHAPE, Tried

PREDICTED = Path(__file__).with_name("predicted.json")
_WITHIN = 0.08
_NAMES = ("one", "fp32", "muon", "recomputed", "selective", "lora", "lora selective", "qlora")
CONFIGURATIONS = {name: (QUICK | FURTHER)[name] for name in _NAMES}
_FAKE = ("lora",)  # the others take too long


def memory(place: Place) -> Outcome:
    """The second step's peak of each configuration.

    The fake takes the steps with a tiny model, and has the dry run once more instead of a peak.
    """
    if place.fake:
        for each in CONFIGURATIONS.values():
            _two_steps(place, each, DecoderConfig(**TINY), lambda: None)
        found = {name: tried(CONFIGURATIONS[name]) for name in _FAKE}
    else:
        found = {name: _measured(place, each) for name, each in CONFIGURATIONS.items()}
    return compare(read_json(PREDICTED), found)


def compare(predicted: dict[str, int], found: dict[str, int]) -> Outcome:
    """The configuration in which the dry run is furthest from what was found."""
    ratios = {name: predicted[name] / found[name] for name in found}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    error = abs(ratios[worst] - 1)
    detail = {"predicted": predicted, "measured": found, "ratios": ratios}
    limits = f"{worst}: {found[worst] / 2**30:.2f} GiB, dry run {predicted[worst] / 2**30:.2f}"
    return Outcome(error, "off at most", ratios[worst], error <= _WITHIN, limits, detail)


def tried(configuration: Tried) -> int:
    """What the dry run says."""
    return dry_run(configuration.laid()[0]).fullest.peak_bytes


def _measured(place: Place, configuration: Tried) -> int:
    before = torch.cuda.memory_allocated()
    _two_steps(place, configuration, SHAPE, torch.cuda.reset_peak_memory_stats)
    free(torch.device(place.device))
    return torch.cuda.max_memory_allocated() - before


def _two_steps(
    place: Place, configuration: Tried, shape: DecoderConfig, between: Callable[[], None]
) -> None:
    train = configuration.laid()[0].recipe.train
    tokens = 4 * train.global_batch_size * shape.context_length
    split = write_split(place.folder, tokens, min(shape.vocab_size, 30_000))
    sections = {"train": train.model_dump(), "adapter": configuration.adapter}
    device = torch.device(place.device)
    trainer = build_trainer(place.folder, split, shape, sections, device).trainer
    with trainer.watchdog, trainer.profiler:
        trainer._step(Position(0))  # makes the moments
        between()
        trainer._step(Position(1))


def ladder(place: Place) -> Outcome:
    """Each rung of `bench ladder` for one process beside the rung before it.

    Only one is compiled here: to compile each takes most of the time that there is.
    """
    options = benchmark.make_data(place.folder) | {"threads": torch.get_num_threads()}
    rungs = [rung.options for rung in benchmark.RUNGS if rung.options["world"] == 1]
    if place.fake:
        options["shape"], rungs = options["shape"] | {"layers": 2, "width": 96}, rungs[:2]
    peaks = {rung["name"]: _peak(place, options, rung) for rung in rungs}
    saved = {
        rung["name"]: 1 - peaks[rung["name"]] / peaks[rung["before"]["name"]]
        for rung in rungs
        if "before" in rung
    }
    short = [rung["name"] for rung in rungs if saved.get(rung["name"], 0) < rung["saves"]]
    limits = f"short: {', '.join(short)}" if short else "all save what they promise"
    detail = {"peak_bytes": peaks, "saved": saved}
    kept = len(rungs) - len(short)
    return Outcome(kept, "rungs", kept / len(rungs), not short, limits, detail)


def _peak(place: Place, options: dict[str, Any], rung: dict[str, Any]) -> int:
    recipe = rung["recipe"]
    if rung["name"] != benchmark.COMPILED.name or place.fake:
        train = {**recipe.get("train", {}), "compile": False}
        recipe = recipe | {"train": train}
    return ladder_ours.peak(place.folder, options | rung | {"recipe": recipe})


if __name__ == "__main__":
    write_json(PREDICTED, {name: tried(each) for name, each in CONFIGURATIONS.items()})
    sys.stdout.write(f"{PREDICTED}\n")

"""One rung of the ladder; where it needs two processes, this one starts the other."""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pipelines.models.config import DecoderConfig
from pipelines.run.records import Split
from pipelines.training.checkpoint.checkpointer import Position
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.our_trainer import Built, build_trainer

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
STORE = "LADDER_STORE"  # set in the second process: where it meets the first
MEASURED_STEPS = 2
NOISE_MIB = 0.5  # what a rung that only claims to be no dearer may need more


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(max(1, options["threads"] // options["world"]))
    if options["world"] > 1:
        _meet(options["world"])
    before = options.get("before")
    figures = {"peak_mib": peak(folder, options) / 2**20}
    if before is not None and before["world"] == options["world"]:
        figures["before_mib"] = peak(folder, options | before) / 2**20
        most = figures["before_mib"] * (1 - options["saves"]) + NOISE_MIB
        if figures["peak_mib"] > most:
            raise SystemExit(f"{options['name']} promises at most {most:.0f} MiB: {figures}")

    def run_round() -> tuple[float, dict[str, Any]]:
        _all_begin()
        built = _build(folder, options, options["train"]["steps"])
        built.trainer.fit()
        return built.points[-1].tokens, figures

    return run_round


def _build(folder: Path, options: dict[str, Any], steps: int) -> Built:
    sections = json.loads(json.dumps(options["recipe"]))
    sections["train"] = options["train"] | sections.get("train", {}) | {"steps": steps}
    fused = sections.pop("optimizer")["fused"]
    split, shape = Split.model_validate(options["split"]), DecoderConfig(**options["shape"])
    scratch = "run-" + "".join(filter(str.isalnum, options["name"]))
    built = build_trainer(folder, split, shape, sections, DEVICE, scratch)
    optimizer: Any = built.trainer.optimizer
    optimizer._step_supports_amp_scaling = fused  # as of one made so
    for group in optimizer.param_groups:
        group["fused"] = fused
    return built


def peak(folder: Path, options: dict[str, Any]) -> int:
    """Bytes at most while a rung's trainer is made and takes two steps; run twice, to compile."""

    def work() -> None:
        trainer = _build(folder, options, MEASURED_STEPS).trainer
        with trainer.watchdog:
            for step in range(MEASURED_STEPS):
                trainer._step(Position(step))

    work()
    gc.collect()
    return _peak_on_gpu(work) if DEVICE.type == "cuda" else _peak_on_cpu(work)


def _peak_on_gpu(work: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(work: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    now = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    return most


def _meet(world: int) -> None:
    """Connect two processes; the second one is started by the first, in its process group."""
    store = os.environ.get(STORE)
    rank = int(store is not None)
    if store is None:
        store = str(Path(tempfile.mkdtemp()) / "store")
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        subprocess.Popen(command, env={**os.environ, STORE: store}, stdin=subprocess.DEVNULL)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def _all_begin() -> None:
    if dist.is_initialized():
        dist.barrier()


def _follow() -> None:
    """The second process does each round when the first one does, until it is ended with it."""
    run_round = prepare(Path(sys.argv[1]), json.loads(sys.argv[2]))
    while True:
        run_round()


if __name__ == "__main__":
    if STORE in os.environ:
        _follow()
    else:
        serve(prepare)

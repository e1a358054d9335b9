"""A recipe's real training step on GPUs that don't exist, in a process of its own; no torch here.

One rank of each pipeline stage runs: the other ranks of a stage do the same.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.models.config import DecoderConfig, RopeScaling, Yarn
from pipelines.parallel.layout import resolve_layout
from pipelines.planning.hardware import Hardware
from pipelines.recipe.recipe import Recipe

HOST_BYTES = 4 << 30  # that one rank may take here
_LAST_LINES = 8  # of a traceback


@dataclass(frozen=True)
class Case:
    """A run to try.

    Attributes:
        recipe: Its `auto` values are replaced.
        shape: Of the model.
        hardware: The GPU.
        world: The number of GPUs.
    """

    recipe: Recipe
    shape: DecoderConfig
    hardware: Hardware
    world: int

    def to_json(self) -> str:
        """Return all of it as text."""
        values = {
            "recipe": self.recipe.to_dict(),
            "shape": asdict(self.shape),
            "hardware": asdict(self.hardware),
            "world": self.world,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the case of `to_json`."""
        values = json.loads(text)
        shape, hardware = values["shape"], values["hardware"]
        if scaling := shape["rope_scaling"]:
            shape["rope_scaling"] = (Yarn if "beta_fast" in scaling else RopeScaling)(**scaling)
        hardware["capability"] = tuple(hardware["capability"])
        return cls(
            Recipe.model_validate(values["recipe"]),
            DecoderConfig(**shape),
            Hardware(**hardware),
            values["world"],
        )


@dataclass(frozen=True)
class RankReport:
    """What happened in a step of one rank.

    Attributes:
        rank: Its number.
        stage: Of the pipeline.
        memory: The bytes of tensors at the peak, by purpose.
        collectives: Each kind and group with its bytes and count, as `Collective` says.
        waits: Where the host waited, how often, and the reason if it is a known one.
        flops: Of products and attention, with those that are computed again.
        graphs: That were compiled of blocks.
    """

    rank: int
    stage: int
    memory: dict[str, int]
    collectives: list[dict[str, Any]]
    waits: list[dict[str, Any]]
    flops: int
    graphs: int

    @property
    def peak_bytes(self) -> int:
        """All bytes at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Report:
    """What the dry run of a case found.

    Attributes:
        ranks: A rank of each pipeline stage.
        seconds: That the dry run took.
    """

    ranks: list[RankReport]
    seconds: float = field(compare=False)

    @property
    def fullest(self) -> RankReport:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda each: each.peak_bytes)


def report_json(report: Report, formula: Mapping[str, float]) -> dict[str, Any]:
    """Return a report as plain values.

    Args:
        report: What the dry run found.
        formula: The bytes that the planner predicts by purpose, without a margin.
    """
    fullest = report.fullest
    return {
        "seconds": report.seconds,
        "peak_bytes": fullest.peak_bytes,
        "formula_bytes": dict(formula),
        "formula_error": sum(formula.values()) / fullest.peak_bytes - 1,
        "ranks": [asdict(each) for each in report.ranks],
    }


def dry_run(case: Case, module: str = "pipelines.training.dry_run") -> Report:
    """Run the case's steps, and return what happened in the last one.

    Args:
        case: What to run.
        module: The module to start for each rank.

    Raises:
        UserError: training would refuse the case, or this can't be tried on the device.
    """
    if case.hardware.capability is None:
        raise UserError(
            f"plan --dry-run: {case.hardware.name} is no NVIDIA GPU with a known compute "
            "capability; give another --gpu, or leave the option out"
        )
    if case.recipe.parallel.ep > 1:
        raise UserError(
            f"plan --dry-run: not with parallel.ep({case.recipe.parallel.ep}): how many tokens "
            "travel depends on numbers, which devices that don't exist have not; set 1"
        )
    began = time.perf_counter()
    layout = resolve_layout(case.recipe.parallel, case.world)
    beside = case.world // layout.pp  # ranks of a stage lie side by side
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ranks = pool.map(lambda stage: _rank(case, stage * beside, module), range(layout.pp))
        return Report(list(ranks), time.perf_counter() - began)


def _rank(case: Case, rank: int, module: str) -> RankReport:
    ended = subprocess.run(
        [sys.executable, "-m", module, str(rank)],
        input=case.to_json(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    if ended.returncode == EXIT_USER_ERROR:
        raise UserError(ended.stderr.strip().splitlines()[-1])
    if ended.returncode:
        last = "\n".join(ended.stderr.strip().splitlines()[-_LAST_LINES:])
        raise RuntimeError(f"the dry run of rank {rank} ended with {ended.returncode}:\n{last}")
    return RankReport(**json.loads(ended.stdout))

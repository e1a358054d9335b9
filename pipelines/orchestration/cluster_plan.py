"""The machine that a run will train on, read from Ray's dashboard without importing ray."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import CPU_CORES, ENTRIES, named, of_driver
from pipelines.planning.plan import Machine
from pipelines.planning.precision_rule import (
    COMPILE,
    PRECISION,
    Device,
    is_settled,
    reasons,
    settle_precision,
)
from pipelines.recipe.recipe import Recipe
from pipelines.registry.parents import Settled
from pipelines.stages.run_plan import dry_run_beforehand, plan_run
from pipelines.training.recipe_check import check_attention

VARIABLE = "PENSTOCK_GPU"  # GPU of each worker if nodes come and go, as in `penstock plan --gpu`
_TIMEOUT = httpx.Timeout(2.0)  # seconds; a run rather starts without a plan than late
_PATIENCE = httpx.Timeout(30.0)  # without a precision it doesn't start, and the machine may be busy
_MIB = 2**20

_log = logging.getLogger(__name__)


def plan_on_cluster(
    settings: Settings, recipe: Recipe, source: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the plan of a run for `plan.json`, or None if its machine is not known.

    Raises:
        UserError: The run cannot fit.
    """
    machine = training_machine(settings, recipe)
    return plan_run(recipe, machine, source) if machine else None


def dry_run_on_cluster(settings: Settings, recipe: Recipe) -> dict[str, Any] | None:
    """Return what `dry_run.json` holds, or None if the recipe doesn't want it or there is no GPU.

    Raises:
        UserError: The run cannot fit.
    """
    if not recipe.resources.dry_run:
        return None
    machine = training_machine(settings, recipe)
    if machine is None or machine.hardware.capability is None:
        _log.warning("no dry run: resources.dry_run needs workers with known NVIDIA GPUs")
        return None
    return dry_run_beforehand(recipe, machine)


def settle_on_cluster(settings: Settings, run: Settled) -> Settled:
    """Return the run with values in place of `train.precision: auto` and `train.compile: auto`.

    They decide the weights, so the run's recipe and the key of *train* hold the values.

    Raises:
        UserError: The GPU is not known.
        UnreachableError: Ray does not report its nodes yet.
    """
    if is_settled(run.recipe):
        return run
    try:
        machine = _machine(settings, run.ready, _PATIENCE)
        if machine.hardware.is_cpu and settings.nodes_command and VARIABLE not in os.environ:
            raise _UnknownMachineError(f"nodes start with the run; set {VARIABLE} to their GPU")
    except _UnknownMachineError as error:
        kind = UnreachableError if error.passes else UserError
        raise kind(
            f"{PRECISION}: auto and {COMPILE}: auto follow from the workers' GPU: {error}; "
            "or set both, as bf16 and true, or on a CPU as fp32 and false"
        ) from error
    device = Device.of(machine.hardware)
    for line in reasons(run.recipe, device):
        _log.info("%s", line)
    settled = settle_precision(run.recipe, device)
    check_attention(settled)
    return replace(run, recipe=settled, ready=settle_precision(run.ready, device))


class _UnknownMachineError(Exception):
    """Why the machine of a run is not known, and whether that may pass."""

    def __init__(self, why: str, *, passes: bool = False) -> None:
        super().__init__(why)
        self.passes = passes


class _Said(BaseModel):
    """The needed part of Ray's answer; its names are in camel case."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


class _Gpu(_Said):
    name: str
    memory_total: int  # MiB


class _Raylet(_Said):
    state: str


class _Node(_Said):
    raylet: _Raylet
    cpus: tuple[int, int] = (0, 0)  # logical, physical; none while a node starts
    mem: tuple[float, ...] = ()  # bytes: all, available, percent, used
    gpus: list[_Gpu] | None = None


class _Summary(_Said):
    summary: list[_Node]


class _Answer(_Said):
    data: _Summary


def training_machine(settings: Settings, recipe: Recipe) -> Machine | None:
    """Return the machine of the recipe's most workers, or None if it is not known beforehand."""
    try:
        return _machine(settings, recipe, _TIMEOUT)
    except _UnknownMachineError as error:
        _log.warning("not planned: %s", error)
        return None


def _machine(settings: Settings, recipe: Recipe, timeout: httpx.Timeout) -> Machine:
    most = recipe.resources.most_workers
    price = recipe.resources.price_per_gpu_hour
    if given := os.environ.get(VARIABLE):
        return Machine(named(given), most, price=price)
    try:
        nodes = _nodes(settings, timeout)
    except (httpx.HTTPError, OSError, ValidationError) as error:
        why = f"Ray's dashboard does not report its nodes: {error!r}"
        raise _UnknownMachineError(why, passes=True) from error
    if not nodes:
        raise _UnknownMachineError("no node has reported its hardware yet", passes=True)
    _check_room(nodes, recipe)
    devices = [gpu for node in nodes for gpu in node.gpus or []]
    if not devices:
        price = recipe.resources.price_per_cpu_hour
        return Machine(_processors(nodes, most), most, price=price or 0.0)
    datasheet = of_driver(devices[0].name)
    if datasheet is None:
        raise _UnknownMachineError(
            f"the hardware table has no {devices[0].name}; set {VARIABLE} to a similar entry"
        )
    hardware = replace(
        datasheet,
        memory_bytes=min(gpu.memory_total for gpu in devices) * _MIB,
        devices_per_node=max(len(node.gpus or []) for node in nodes),
    )
    return Machine(hardware, most, price=price or 0.0)


def _check_room(nodes: Sequence[_Node], recipe: Recipe) -> None:
    """Refuse a number of workers for which the job would wait for ever."""
    if load_settings().nodes_command:
        return  # which starts nodes for the run
    gpus = sum(len(node.gpus or []) for node in nodes)
    room, kind = (gpus, "GPUs") if gpus else (sum(node.cpus[0] for node in nodes), "CPUs")
    least, _ = recipe.resources.worker_range
    samplers = recipe.reinforcement.samplers
    if least + samplers > room:
        key, who = f"resources.workers = {least}", "worker"
        if samplers:
            key, who = f"{key} and reinforcement.samplers = {samplers}", "worker and sampler"
        raise UserError(
            f"{key}: the Ray cluster has {room} {kind}, one for each {who}, so the job would wait "
            f"for ever; set resources.workers to {room - samplers} or fewer, or start nodes; where "
            f"nodes come and go, {VARIABLE} names their GPU and nothing is refused"
        )


def _nodes(settings: Settings, timeout: httpx.Timeout) -> list[_Node]:
    """Return the nodes that are alive and have reported their hardware."""
    answer = httpx.get(
        f"{settings.ray_url}/nodes",
        params={"view": "summary"},
        auth=TokenFile(settings.ray_token_path),
        timeout=timeout,
    )
    nodes = _Answer.model_validate(answer.raise_for_status().json()).data.summary
    return [node for node in nodes if node.raylet.state == "ALIVE" and node.mem]


def _processors(nodes: Sequence[_Node], workers: int) -> Hardware:
    """Return a worker's share of the smallest node: the table's CPU, scaled by cores."""
    each = -(-workers // len(nodes))
    cores = min(node.cpus[0] for node in nodes) / each
    cpu, share = ENTRIES["cpu"], cores / CPU_CORES
    return replace(
        cpu,
        name=f"{cores:g} cores, as in a {cpu.name}",
        flops={precision: rate * share for precision, rate in cpu.flops.items()},
        memory_bandwidth=cpu.memory_bandwidth * share,
        memory_bytes=int(min(node.mem[0] for node in nodes)) // each,
        devices_per_node=each,
    )

"""The complete plan of a run on a machine; no torch here.

As plain values, the plan is the output of `penstock plan --json` and a run's `plan.json`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.models.config import DecoderConfig
from pipelines.planning.cost import PREPROCESS_RATE, StageCost, energy_kwh, model_flops
from pipelines.planning.hardware import Hardware
from pipelines.planning.layout_rule import Choice
from pipelines.planning.layout_search import GIB, Candidate, own, search
from pipelines.planning.precision_rule import Device, reasons, settle_precision
from pipelines.planning.step_time import StepTime, trainable
from pipelines.planning.storage_needs import (
    CheckpointSize,
    Demand,
    Failures,
    Storage,
    checkpoint_size,
    demands,
    failures,
    stall_seconds,
)
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import stage_names

# For English text and vocabularies of tens of thousands; other tokenizers count one byte per token.
_BYTES_A_TOKEN = {"bpe": 4, "pretrained": 4, "model": 4, "extension": 4}


@dataclass(frozen=True)
class Machine:
    """The devices and the storage that a run gets.

    Attributes:
        hardware: The type of all devices.
        gpus: The number of devices.
        storage: The storage that all nodes share; None if its rates are unknown.
        price: The price of a device per hour; None means the price in `hardware`.
    """

    hardware: Hardware
    gpus: int
    storage: Storage | None = None
    price: float | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes; all but the last are full."""
        return -(-self.gpus // self.hardware.devices_per_node)

    @property
    def price_per_hour(self) -> float | None:
        """The price of all devices per hour; None if no price is known."""
        each = self.hardware.hourly_price if self.price is None else self.price
        return None if each is None else each * self.gpus


@dataclass(frozen=True)
class Forecast:
    """The predicted time and cost of a run with one layout.

    Attributes:
        step_seconds: The time of an optimizer step, including waiting for data.
        tokens_per_second: Tokens per second of all devices together.
        mfu: Model FLOPs utilisation of the whole machine.
        bound_by: The resource that takes most of a step.
        bound_share: That resource's share of a step.
        steps: Optimizer steps of the run.
        flops: The model's FLOPs, including attention, without recomputation.
        failures: The expected failures, and the best time between checkpoints.
        checkpoint: The size of one checkpoint in bytes.
        stall_seconds: How long one checkpoint keeps training waiting.
        demands: The rates that each node needs from the storage.
        stages: The time and price of each stage by name.
        kwh: The energy of the devices in training.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    bound_by: str
    bound_share: float
    steps: int
    flops: float
    failures: Failures
    checkpoint: CheckpointSize
    stall_seconds: float
    demands: list[Demand]
    stages: dict[str, StageCost]
    kwh: float

    @property
    def hours(self) -> float:
        """The wall-clock hours of training, with checkpoints and restarts."""
        return self.failures.seconds / 3600

    @property
    def cost(self) -> float | None:
        """The cost of all stages of known time and price; None if training's price is unknown."""
        if self.stages["train"].cost is None:
            return None
        return sum(stage.cost or 0.0 for stage in self.stages.values())


@dataclass(frozen=True)
class Plan:
    """Whether a run fits a machine, with which layout, how long it takes and what it costs.

    Attributes:
        machine: The machine.
        parameters: The number of the model's parameters.
        settled: A line for each `auto` of precision and compiling, with its value and why.
        asked: The layouts that the recipe itself allows, the fastest first.
        layouts: All layouts that were tried, the fastest first.
        forecast: The forecast for the first of `asked`; None if that layout does not fit.
    """

    machine: Machine
    parameters: int
    settled: list[str]
    asked: list[Candidate]
    layouts: list[Candidate]
    forecast: Forecast | None

    @property
    def fits(self) -> bool:
        """Whether the unchanged recipe runs on the machine."""
        return self.forecast is not None


def plan(
    recipe: Recipe,
    config: DecoderConfig,
    machine: Machine,
    *,
    any_layout: bool = False,
    text_bytes: int | None = None,
) -> Plan:
    """Plan a run.

    Args:
        recipe: The recipe; the search replaces its `auto` values.
        config: The model's shape, with vocabulary and context filled in.
        machine: The machine that the run uses.
        any_layout: Whether to ignore the recipe's own layout and activation checkpointing.
        text_bytes: The size of the source's text; None if it was not measured.

    Raises:
        UserError: No layout of these devices can divide the model or its batch.
    """
    device = Device.of(machine.hardware)
    settled = reasons(recipe, device)
    recipe = settle_precision(recipe, device)
    layouts = search(recipe, config, machine.hardware, machine.gpus)
    asked = layouts if any_layout else own(recipe, config, machine.hardware, machine.gpus)
    best = asked[0]
    forecast = None
    if best.fits and best.choice is not None and best.step is not None:
        forecast = _forecast(recipe, config, machine, best.choice, best.step, text_bytes)
    return Plan(machine, config.parameters, settled, asked, layouts, forecast)


def _forecast(
    recipe: Recipe,
    config: DecoderConfig,
    machine: Machine,
    choice: Choice,
    step: StepTime,
    text_bytes: int | None,
) -> Forecast:
    training, train, hardware = choice.training, recipe.train, machine.hardware
    needs = demands(
        config,
        training,
        nodes=machine.nodes,
        step_seconds=step.total,
        checkpoint_seconds=step.total * train.checkpoint_every,
        storage=machine.storage,
    )
    waits = needs[0].seconds or 0.0
    seconds = max(step.total, waits)
    # Data is read ahead, so nothing waits for it while the storage is faster than the step.
    resources = {"storage": waits} if waits > step.total else step.resources
    bound_by = max(resources, key=resources.__getitem__)
    tokens = train.global_batch_size * recipe.data.sequence_length
    part = trainable(config, training)
    flops = model_flops(config, tokens, recipe.data.sequence_length, part)
    precision = train.fixed_precision
    size = checkpoint_size(config, training)
    stall = stall_seconds(size, training, hardware.pcie_bandwidth)
    reference = _reference_seconds(recipe, step.total, text_bytes)
    expected = failures(seconds * train.steps + reference, machine.gpus, stall)
    trains = StageCost(expected.seconds / 3600, machine.price_per_hour, bound_by)
    return Forecast(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / machine.gpus / hardware.peak(precision),
        bound_by=bound_by,
        bound_share=resources[bound_by] / seconds,
        steps=train.steps,
        flops=flops * train.steps,
        failures=expected,
        checkpoint=size,
        stall_seconds=stall,
        demands=needs,
        stages=_stages(recipe, trains, tokens / seconds, text_bytes),
        kwh=energy_kwh(hardware, machine.gpus, expected.seconds / 3600),
    )


def _reference_seconds(recipe: Recipe, step_seconds: float, text_bytes: int | None) -> float:
    """Return the time of the pass that measures the reference of pairs, before the first step."""
    steps: float = recipe.train.steps  # as if training read all pairs once
    if text_bytes is not None:
        tokens = text_bytes / _BYTES_A_TOKEN.get(recipe.data.tokenizer.kind, 1)
        steps = tokens / recipe.data.sequence_length / recipe.train.global_batch_size
    # A forward pass is a third of a step.
    return steps * step_seconds / 3 if recipe.preference.needs_reference else 0.0


def _stages(
    recipe: Recipe, trains: StageCost, tokens_per_second: float, text_bytes: int | None
) -> dict[str, StageCost]:
    """Return each stage's time if predictable, its price per hour and its bottleneck.

    CPUs clean, tokenise and inspect text at rates far below any storage's.
    """
    most, cpu = recipe.resources.most_workers, recipe.resources.price_per_cpu_hour
    cleaning = None if text_bytes is None else text_bytes / PREPROCESS_RATE / most / 3600
    why = "only the source knows how much text there is" if cleaning is None else None
    a_token = _BYTES_A_TOKEN.get(recipe.data.tokenizer.kind, 1)
    scored = recipe.evaluate.max_bytes / a_token / recipe.evaluate.stride
    forward = scored / 3 / tokens_per_second / 3600
    known = {
        "preprocess": StageCost(cleaning, None if cpu is None else cpu * most, "compute", why),
        "train": trains,
        "evaluate": StageCost(forward, trains.price_per_hour, "compute"),
    }
    light = StageCost(None, cpu, "compute", "its speed was not measured: one CPU, a few minutes")
    return {stage: known.get(stage, light) for stage in stage_names()}


def plan_json(found: Plan, limit: int | None = None) -> dict[str, Any]:
    """Return a plan as one object of plain values.

    Args:
        found: The plan.
        limit: The most layouts to include; None includes all.
    """
    machine, forecast = found.machine, found.forecast
    result: dict[str, Any] = {
        "fits": found.fits,
        "gpu": machine.hardware.name,
        "gpus": machine.gpus,
        "nodes": machine.nodes,
        "parameters": found.parameters,
        "settled": found.settled,
        "mfu_is_assumed": machine.hardware.mfu is None,
        "asked": _candidate_json(found.asked[0]),
        "layouts": [_candidate_json(each) for each in found.layouts[:limit]],
        "flops": None,
        "hours": None,
        "cost": None,
    }
    if forecast is None:
        return result
    values = asdict(forecast)
    values["checkpoint"]["total"] = forecast.checkpoint.total
    for each, demand in zip(values["demands"], forecast.demands, strict=True):
        each["holds"] = demand.holds
    for name, stage in forecast.stages.items():
        values["stages"][name]["cost"] = stage.cost
    return result | values | {"hours": forecast.hours, "cost": forecast.cost}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    choice, step = candidate.choice, candidate.step
    result: dict[str, Any] = {
        "name": candidate.name,
        "fits": candidate.fits,
        "why_not": candidate.why_not,
        "step_seconds": None,
        "memory_gib": None,
    }
    if choice is None or step is None:
        return result
    training = choice.training
    memory = {part: size / GIB for part, size in choice.memory.parts.items()}
    return result | {
        **vars(training.layout),
        "sharding": training.sharding,
        "micro_batch_size": training.micro_batch,
        "activation_checkpoint": training.activation_checkpoint,
        "precision": training.precision,
        "compile": training.compiled,
        "step_seconds": step.total,
        "step_parts": {key: value for key, value in asdict(step).items() if key != "memory"},
        "memory_gib": memory | {"total": choice.memory.total / GIB},
    }

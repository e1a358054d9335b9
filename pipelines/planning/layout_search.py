"""A search for the best layouts, the smallest machine and the largest model of a run; no torch.

The search tries the layouts of `parallel: auto` with every mode of activation checkpointing, with
shards within a node and, for long samples, with context parallelism. An impossible layout is
returned with the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware
from pipelines.planning.layout_rule import Choice, Refusal, choose, is_left_to_the_rule, tries
from pipelines.planning.memory import estimate
from pipelines.planning.memory_training import Training
from pipelines.planning.precision_rule import Device, settle_precision
from pipelines.planning.step_time import StepTime, step_time
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values

Checkpointing = Literal["none", "selective", "full"]
LONG = 16_384  # context parallelism is tried for samples of at least so many tokens
GIB = 2**30
_MACHINES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Candidate:
    """A layout on a machine with its memory and speed, or the reason why it is impossible.

    Attributes:
        name: The layout's name for users.
        choice: The layout; None if it cannot divide the model or its batch.
        step: The time of a step; None if `choice` is None.
        why_not: The reason why the layout cannot run; None if it fits.
    """

    name: str
    choice: Choice | None
    step: StepTime | None
    why_not: str | None

    @property
    def fits(self) -> bool:
        """Whether the layout can run."""
        return self.why_not is None


def own(recipe: Recipe, config: DecoderConfig, hardware: Hardware, gpus: int) -> list[Candidate]:
    """Return the layouts that the recipe allows; the first is the one that a run would use."""
    recipe = settle_precision(recipe, Device.of(hardware))
    ranked = _ranked(list(tries(recipe, config, gpus)), config, hardware)
    if not is_left_to_the_rule(recipe) or not ranked[0].fits:
        return ranked
    taken = choose(recipe, config, gpus, hardware.memory_bytes, hardware=hardware)
    first = _candidate(taken, config, hardware)
    return [first, *(each for each in ranked if each.name != first.name)]


def search(recipe: Recipe, config: DecoderConfig, hardware: Hardware, gpus: int) -> list[Candidate]:
    """Return all layouts, even those the recipe excludes: fitting ones by time, then the others.

    Args:
        recipe: The recipe with batch, precision, adapter and schedule; a fixed sharding is kept.
        config: The model's shape, with vocabulary and context filled in.
        hardware: The type of all devices.
        gpus: The number of devices.
    """
    recipe = settle_precision(recipe, Device.of(hardware))
    found: list[Choice | Refusal] = []
    for variant in _variants(recipe, config, hardware, gpus):
        for each in tries(variant, config, gpus):
            found += [each] if isinstance(each, Refusal) else _checkpointing(each, config)
    return _ranked(found, config, hardware)


def nearest(candidates: list[Candidate], number: int = 3) -> list[Candidate]:
    """Return the layouts that exceed the memory by least, to show them to a user."""
    return [each for each in candidates if each.choice is not None and not each.fits][:number]


def smallest_machine(
    recipe: Recipe, config: DecoderConfig, entries: Mapping[str, Hardware]
) -> list[tuple[str, int]]:
    """Return the fewest devices of each type on which the run fits, least total memory first."""
    found = []
    for name, hardware in entries.items():
        for gpus in _MACHINES:
            if any(each.fits for each in search(recipe, config, hardware, gpus)):
                found.append((name, gpus))
                break
    return sorted(found, key=lambda each: entries[each[0]].memory_bytes * each[1])


def largest_model(
    recipe: Recipe, models: Mapping[str, DecoderConfig], hardware: Hardware, gpus: int
) -> dict[str, str]:
    """Return the largest model that a machine can fine-tune with each kind of adapter."""
    by_size = sorted(models, key=lambda name: models[name].parameters, reverse=True)
    found: dict[str, str] = {}
    for kind in ("none", "lora", "qlora"):
        adapted = override_values(recipe, {"adapter.kind": kind})
        for name in by_size:
            fits = any(each.fits for each in search(adapted, models[name], hardware, gpus))
            if fits:
                found[kind] = name
                break
    return found


def _variants(
    recipe: Recipe, config: DecoderConfig, hardware: Hardware, gpus: int
) -> Iterator[Recipe]:
    """Yield the recipe with `auto` layouts, once for each setting that the rule does not vary."""
    sharding = recipe.parallel.sharding
    open_: dict[str, object] = dict.fromkeys(
        ("parallel.tp", "parallel.pp", "parallel.dp_replicate", "parallel.dp_shard"), "auto"
    )
    open_ |= {"train.micro_batch_size": "auto"}
    yield override_values(recipe, open_ | {"parallel.cp": 1})
    if sharding in ("auto", "gradients", "full") and gpus > hardware.devices_per_node > 1:
        # With one replica per node, gathers stay on the fast links.
        in_node = {
            "parallel.dp_shard": hardware.devices_per_node,
            "parallel.sharding": "full" if sharding == "auto" else sharding,
            "parallel.tp": 1,
            "parallel.pp": 1,
            "parallel.cp": 1,
        }
        yield override_values(recipe, open_ | in_node)
    if recipe.data.sequence_length >= LONG and recipe.adapter.kind == "none":
        for cp in (2, 4, 8):
            yield override_values(recipe, open_ | {"parallel.cp": cp})
    if sharding in ("auto", "gradients", "full"):
        divided: dict[str, object] = {
            "parallel.sharding": "full" if sharding == "auto" else sharding,
            "train.compile": False,  # the exchanges of expert parallelism can't be compiled
        }
        for ep in (2, 4, 8, 16, 32, 64):
            if ep <= min(config.experts, gpus):
                yield override_values(recipe, open_ | divided | {"parallel.ep": ep})


def _checkpointing(choice: Choice, config: DecoderConfig) -> Iterator[Choice]:
    for mode in get_args(Checkpointing):
        training = replace(choice.training, activation_checkpoint=mode)
        yield Choice(choice.laid, training, estimate(config, training))


def _ranked(
    found: list[Choice | Refusal], config: DecoderConfig, hardware: Hardware
) -> list[Candidate]:
    """Return one candidate per layout, with the fastest micro-batch that fits."""
    best: dict[str, Candidate] = {}
    for each in found:
        candidate = _candidate(each, config, hardware)
        known = best.get(candidate.name)
        if known is None or _rank(candidate) < _rank(known):
            best[candidate.name] = candidate
    return sorted(best.values(), key=_rank)


def _candidate(each: Choice | Refusal, config: DecoderConfig, hardware: Hardware) -> Candidate:
    if isinstance(each, Refusal):
        return Candidate(str(each), None, None, str(each.why))
    tp, neighbours = each.training.layout.tp, hardware.devices_per_node
    if each.training.async_tp and tp > neighbours:
        why = f"parallel.async_tp: parallel.tp({tp}) is more than the {neighbours} of a node"
        return Candidate(_name(each.training), None, None, why)
    if hardware.is_cpu:
        training = replace(each.training, on_cpu=True)
        each = replace(each, training=training, memory=estimate(config, training))
    step = step_time(config, each.training, hardware)
    fits = each.memory.total <= hardware.memory_bytes
    return Candidate(_name(each.training), each, step, None if fits else _why_not(each, hardware))


def _why_not(choice: Choice, hardware: Hardware) -> str:
    """Return why a layout needs too much memory, with the part that takes most of it."""
    memory = choice.memory
    parts = {name: size for name, size in memory.parts.items() if name != "margin"}
    largest = max(parts, key=parts.__getitem__)
    needed, given = (f"{size / GIB:.1f}" for size in (memory.total, hardware.memory_bytes))
    return f"needs {needed} GiB of {given}, most for {largest} ({parts[largest] / GIB:.1f})"


def ways(training: Training) -> str:
    """Return a layout's name such as `dp_shard 4 x tp 2`, without the dimensions of size 1."""
    sizes = vars(training.layout) | {"ep": training.ep}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one"


def _name(training: Training) -> str:
    text = f"{ways(training)}, sharding {training.sharding}"
    if training.activation_checkpoint != "none":
        text += f", recompute {training.activation_checkpoint}"
    return text


def _rank(candidate: Candidate) -> tuple[int, float]:
    """Return a sort key: fitting layouts by time, too large ones by memory, impossible ones."""
    if candidate.choice is None or candidate.step is None:
        return (2, 0.0)
    return (0, candidate.step.total) if candidate.fits else (1, _needs(candidate))


def _needs(candidate: Candidate) -> float:
    return candidate.choice.memory.total if candidate.choice else 0.0

"""Every layout of a run on a machine, the fastest first, and machines and models by size; no torch.

What `parallel: auto` would try is tried with each way of activation checkpointing, with shards that
end at a node, and, for long samples, with context parallelism. A layout that can't be has its
reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import Layout
from pipelines.planning.hardware import Hardware
from pipelines.planning.layout_rule import Choice, Refusal, choose, is_left_to_the_rule, tries
from pipelines.planning.memory import estimate
from pipelines.planning.memory_training import Training
from pipelines.planning.step_time import StepTime, step_time
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values

Checkpointing = Literal["none", "selective", "full"]
LONG = 16_384  # tokens of a sample from which on context parallelism is tried
GIB = 2**30
_MACHINES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Candidate:
    """A layout on a machine: what it needs and how fast it is, or why it can't be.

    Attributes:
        name: The layout, for a user.
        choice: None where the layout can't divide the model or its batch.
        step: None likewise.
        why_not: None where it fits.
    """

    name: str
    choice: Choice | None
    step: StepTime | None
    why_not: str | None

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.why_not is None


def own(recipe: Recipe, config: DecoderConfig, hardware: Hardware, gpus: int) -> list[Candidate]:
    """What the recipe itself allows: first what a run would take, then what `auto` could be too."""
    ranked = _ranked(list(tries(recipe, config, gpus)), config, hardware)
    if not is_left_to_the_rule(recipe) or not ranked[0].fits:
        return ranked
    taken = choose(recipe, config, gpus, hardware.memory_bytes, hardware=hardware)
    first = _candidate(taken, config, hardware)
    return [first, *(each for each in ranked if each.name != first.name)]


def search(recipe: Recipe, config: DecoderConfig, hardware: Hardware, gpus: int) -> list[Candidate]:
    """All layouts, whatever the recipe says of them: those that fit by time, then the others.

    Args:
        recipe: Whose batch, precision, adapter and schedule are used; a sharding is kept, if any.
        config: The model's shape, sized.
        hardware: Of every device.
        gpus: Devices.
    """
    found: list[Choice | Refusal] = []
    for variant in _variants(recipe, hardware, gpus):
        for each in tries(variant, config, gpus):
            found += [each] if isinstance(each, Refusal) else _checkpointing(each, config)
    return _ranked(found, config, hardware)


def nearest(candidates: list[Candidate], number: int = 3) -> list[Candidate]:
    """The layouts that need least memory of those that need too much; shown to a user."""
    return [each for each in candidates if each.choice is not None and not each.fits][:number]


def smallest_machine(
    recipe: Recipe, config: DecoderConfig, entries: Mapping[str, Hardware]
) -> list[tuple[str, int]]:
    """The fewest devices of each kind on which the run fits, those of the least memory first."""
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
    """The largest model that each adapter fine-tunes on a machine, by the adapter's kind."""
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


def _variants(recipe: Recipe, hardware: Hardware, gpus: int) -> Iterator[Recipe]:
    """The recipe with its layout left open, under what the rule itself does not vary."""
    sharding = recipe.parallel.sharding
    open_: dict[str, object] = dict.fromkeys(
        ("parallel.tp", "parallel.pp", "parallel.dp_replicate", "parallel.dp_shard"), "auto"
    )
    open_ |= {"train.micro_batch_size": "auto"}
    yield override_values(recipe, open_ | {"parallel.cp": 1})
    if sharding in ("auto", "gradients", "full") and gpus > hardware.devices_per_node > 1:
        # A replica a node: gathers stay on the fast links.
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


def _checkpointing(choice: Choice, config: DecoderConfig) -> Iterator[Choice]:
    for mode in get_args(Checkpointing):
        training = replace(choice.training, activation_checkpoint=mode)
        yield Choice(choice.laid, training, estimate(config, training))


def _ranked(
    found: list[Choice | Refusal], config: DecoderConfig, hardware: Hardware
) -> list[Candidate]:
    """One candidate a layout, with the micro-batch that is the fastest of those that fit."""
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
    if hardware.is_cpu:
        training = replace(each.training, on_cpu=True)
        each = replace(each, training=training, memory=estimate(config, training))
    step = step_time(config, each.training, hardware)
    fits = each.memory.total <= hardware.memory_bytes
    return Candidate(_name(each.training), each, step, None if fits else _why_not(each, hardware))


def _why_not(choice: Choice, hardware: Hardware) -> str:
    """Why a layout's memory is too much, with the part that takes most of it."""
    memory = choice.memory
    parts = {name: size for name, size in memory.parts.items() if name != "margin"}
    largest = max(parts, key=parts.__getitem__)
    needed, given = (f"{size / GIB:.1f}" for size in (memory.total, hardware.memory_bytes))
    return f"needs {needed} GiB of {given}, most for {largest} ({parts[largest] / GIB:.1f})"


def ways(layout: Layout) -> str:
    """Such as `dp_shard 4 x tp 2`; what is 1 is left out."""
    return " x ".join(f"{name} {size}" for name, size in vars(layout).items() if size > 1) or "one"


def _name(training: Training) -> str:
    text = f"{ways(training.layout)}, sharding {training.sharding}"
    if training.activation_checkpoint != "none":
        text += f", recompute {training.activation_checkpoint}"
    return text


def _rank(candidate: Candidate) -> tuple[int, float]:
    """Those that fit by seconds, then those that don't by memory, then what can't be."""
    if candidate.choice is None or candidate.step is None:
        return (2, 0.0)
    return (0, candidate.step.total) if candidate.fits else (1, _needs(candidate))


def _needs(candidate: Candidate) -> float:
    return candidate.choice.memory.total if candidate.choice else 0.0

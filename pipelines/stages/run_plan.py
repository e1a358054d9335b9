"""The plan of a run before it begins, and the shape of its model before its data exist."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import load_config
from pipelines.models.presets import preset
from pipelines.planning.layout_search import GIB, Candidate
from pipelines.planning.memory import HEADROOM
from pipelines.planning.plan import Machine, Plan, plan, plan_json
from pipelines.recipe.recipe import Recipe

_BYTES = 257  # ids of single bytes, and one that ends a document; usually more than characters


def shape_beforehand(recipe: Recipe) -> DecoderConfig:
    """Return the shape that `stages/train/train_stage.py` will train, as far as a recipe tells.

    Raises:
        UserError: The preset, or the folder to start from, does not exist.
    """
    tokenizer, base = recipe.data.tokenizer, recipe.model.init_from
    if base is not None:
        if not Path(base).is_dir():
            raise UserError(
                f"model.init_from = {base}: no such folder; planning reads its config.json; "
                "give --model to use the shape of a preset"
            )
        return load_config(Path(base))
    shape = preset(recipe.model.preset)
    trained = tokenizer.vocab_size
    vocabulary = {"bpe": trained, "extension": trained, "pretrained": shape.vocab_size}
    size = vocabulary.get(tokenizer.kind) or _BYTES
    return shape.sized(size, recipe.data.sequence_length)


_NEAREST = 3


def plan_run(
    recipe: Recipe, machine: Machine, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the plan of a run as plain values.

    Args:
        recipe: The recipe to run.
        machine: The machine to run it on.
        source: The content of `source.json`.

    Raises:
        UserError: The run does not fit the machine; the message names layouts that do.
    """
    text = _text_bytes(source or {})
    found = plan(recipe, shape_beforehand(recipe), machine, text_bytes=text)
    # A layout that doesn't exist for the largest number of workers may exist for fewer.
    if not found.fits and not (recipe.resources.is_elastic and found.asked[0].choice is None):
        raise UserError(_refusal(found))
    return plan_json(found, limit=_NEAREST)


def dry_run_plan(found: Plan, shape: DecoderConfig) -> dict[str, Any]:
    """Run the real step of a plan's first layout on fake devices, and return what happened.

    Raises:
        UserError: The layout can't be tried.
    """
    from pipelines.training.dry_run.dry_run import Case, dry_run, report_json

    asked, machine = found.asked[0], found.machine
    if asked.choice is None:
        raise UserError(f"plan --dry-run: {asked.name} can't run: {asked.why_not}")
    report = dry_run(Case(asked.choice.recipe, shape, machine.hardware, machine.gpus))
    formula = asked.choice.memory.parts
    del formula["margin"]
    return report_json(report, formula)


def dry_run_beforehand(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """Return the dry run of a run that is prepared, as plain values.

    Raises:
        UserError: Its tensors need more memory than a device has.
    """
    shape = shape_beforehand(recipe)
    tried = dry_run_plan(plan(recipe, shape, machine), shape)
    wanted, there = tried["peak_bytes"] / HEADROOM, machine.hardware.memory_bytes
    if wanted > there:
        raise UserError(
            f"train can't run on {machine.gpus} x {machine.hardware.name}: the dry run needs "
            f"{wanted / GIB:.3g} GiB with a tenth for the allocator, but a device has "
            f"{there / GIB:.3g} GiB; set train.activation_checkpoint = full, a smaller "
            "train.micro_batch_size, or more workers"
        )
    return tried


def _text_bytes(source: Mapping[str, Any]) -> int | None:
    """Return all inputs' bytes; None if a size is unknown, as for a dataset version."""
    sizes = [each.get("bytes") for each in source.get("source", {}).get("inputs", ())]
    return sum(sizes) if sizes and None not in sizes else None


def _refusal(found: Plan) -> str:
    asked, machine = found.asked[0], found.machine
    where = f"{machine.gpus} x {machine.hardware.name}"
    said = f"train can't run on {where}: {asked.name}: {asked.why_not}"
    fitting = [each for each in found.layouts if each.fits][:_NEAREST]
    if fitting:
        return f"{said}; these layouts fit: {'; '.join(map(_told, fitting))}"
    least = next((each for each in found.layouts if each.choice is not None), asked)
    return (
        f"{said}; no layout for this number of devices fits; the one that needs the least memory "
        f"is {_told(least)}: use more or larger devices, a smaller model, an adapter, or a smaller "
        "global batch"
    )


def _told(candidate: Candidate) -> str:
    choice = candidate.choice
    if choice is None:
        return candidate.name
    return (
        f"{candidate.name}, micro_batch_size {choice.training.micro_batch} "
        f"({choice.memory.total / GIB:.3g} GiB)"
    )

"""What planning says of a run before it begins.

The shape of a recipe's model before its data are there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import load_config
from pipelines.models.presets import preset
from pipelines.planning.layout_search import GIB, Candidate
from pipelines.planning.plan import Machine, Plan, plan, plan_json
from pipelines.recipe.recipe import Recipe

_BYTES = 257  # ids of single bytes, and one that ends a document; characters are fewer as a rule


def shape_beforehand(recipe: Recipe) -> DecoderConfig:
    """What `stages/train/train_stage.py` will train, as far as a recipe tells.

    Raises:
        UserError: no such preset, or no folder to start from.
    """
    tokenizer, base = recipe.data.tokenizer, recipe.model.init_from
    if base is not None:
        if not Path(base).is_dir():
            raise UserError(
                f"model.init_from = {base}: no such folder; planning reads its config.json, or "
                "takes the shape of a preset: --model"
            )
        return load_config(Path(base))
    shape = preset(recipe.model.preset)
    vocabulary = {"bpe": tokenizer.vocab_size, "pretrained": shape.vocab_size}
    size = vocabulary.get(tokenizer.kind) or _BYTES
    return shape.sized(size, recipe.data.sequence_length)


_NEAREST = 3


def plan_run(
    recipe: Recipe, machine: Machine, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The plan of a run as plain values.

    Args:
        recipe: What is to run.
        machine: On which.
        source: What `source.json` holds.

    Raises:
        UserError: it can't fit the machine; one line with layouts that would.
    """
    text = _text_bytes(source or {})
    found = plan(recipe, shape_beforehand(recipe), machine, text_bytes=text)
    # A layout that the most workers can't have may be one for fewer.
    if not found.fits and not (recipe.resources.is_elastic and found.asked[0].choice is None):
        raise UserError(_refusal(found))
    return plan_json(found, limit=_NEAREST)


def _text_bytes(source: Mapping[str, Any]) -> int | None:
    """Return all inputs' bytes; None where their sizes aren't known, as of a dataset version."""
    sizes = [each.get("bytes") for each in source.get("source", {}).get("inputs", ())]
    return sum(sizes) if sizes and None not in sizes else None


def _refusal(found: Plan) -> str:
    asked, machine = found.asked[0], found.machine
    where = f"{machine.gpus} x {machine.hardware.name}"
    said = f"train can't run on {where}: {asked.name}: {asked.why_not}"
    fitting = [each for each in found.layouts if each.fits][:_NEAREST]
    if fitting:
        return f"{said}; these would: {'; '.join(map(_told, fitting))}"
    least = next((each for each in found.layouts if each.choice is not None), asked)
    return (
        f"{said}; no layout of so many would, the least is {_told(least)}: use more or larger "
        "devices, a smaller model, an adapter, or a smaller global batch"
    )


def _told(candidate: Candidate) -> str:
    choice = candidate.choice
    if choice is None:
        return candidate.name
    return (
        f"{candidate.name}, micro_batch_size {choice.training.micro_batch} "
        f"({choice.memory.total / GIB:.3g} GiB)"
    )

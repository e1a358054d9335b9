"""What planning says of a run before it begins."""

from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.planning.plan import Machine, Plan, plan
from pipelines.planning.plan_json import plan_json
from pipelines.planning.search import GIB, Candidate
from pipelines.stages.run_shape import shape_beforehand

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
    """Of all inputs as they lie; None where their sizes aren't told, as of a dataset version."""
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

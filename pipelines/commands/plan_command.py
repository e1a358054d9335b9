"""`penstock plan`: whether a run fits, its time and cost, and its best layout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.commands.options import Json, Overrides
from pipelines.core.errors import UserError

if TYPE_CHECKING:
    from pipelines.models.config import DecoderConfig
    from pipelines.planning.hardware import Hardware
    from pipelines.planning.plan import Plan
    from pipelines.planning.serving_plan import Owned
    from pipelines.planning.storage_needs import Storage
    from pipelines.recipe.recipe import Recipe

_GIGA = 1e9
_TRAINING = "training"
_RUN = ("--price", "--storage", "--mfu", "--plot", "--dry-run")
# The options that each question does not use.
_UNUSED = {
    "--serve": (
        "--adapter",
        "--sharding",
        "--mfu",
        "--plot",
        "--dry-run",
        "--smallest",
        "--largest",
    ),
    "--smallest": ("--largest", "--gpu", "--gpus", *_RUN),
    "--largest": ("--adapter", *_RUN),
    _TRAINING: ("--weights", "--own", "--kwh"),
}

Preset = Annotated[str | None, typer.Option(help="A preset: gpt3-175b, llama3-70b, gpt2-124m, ...")]
GivenRecipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", metavar="R", help="A shipped recipe or a YAML file."),
]
Gpu = Annotated[str, typer.Option(help="h200, a100-80, rtx4090, mi300x, cpu, ...")]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="Number of GPUs; else the recipe's, or one node.")
]
Adapter = Annotated[Literal["none", "lora", "qlora"] | None, typer.Option()]
Zero = Annotated[Literal["none", "optimizer", "gradients", "full"] | None, typer.Option()]
Serve = Annotated[bool, typer.Option("--serve", help="Plan serving, not training.")]
Weights = Annotated[Literal["bf16", "int8", "int4"], typer.Option(help="Serving: the weights.")]
Own = Annotated[float | None, typer.Option(min=0, help="Serving: USD to buy a GPU with its host.")]
Kwh = Annotated[float | None, typer.Option(min=0, help="With --own: USD per kWh.")]
Mfu = Annotated[
    float | None, typer.Option(min=0.01, max=0.99, help="This GPU's MFU on a 3B model, one node.")
]
Price = Annotated[float | None, typer.Option(min=0, help="USD per GPU-hour.")]
Rate = Annotated[
    float | None, typer.Option(min=0.001, help="GB/s that all nodes share, to read and to write.")
]
Smallest = Annotated[bool, typer.Option("--smallest", help="Find the fewest GPUs of each kind.")]
Largest = Annotated[
    bool, typer.Option("--largest", help="Find the largest preset that these GPUs train.")
]
Plot = Annotated[Path | None, typer.Option(help="Plot each layout's memory: a .png or .html file.")]

Dry = Annotated[
    bool, typer.Option("--dry-run", help="Run the real step on GPUs that don't exist, too.")
]


def plan(
    context: typer.Context,
    model: Preset = None,
    recipe: GivenRecipe = None,
    overrides: Overrides = None,
    gpu: Gpu = "h100",
    gpus: Gpus = None,
    adapter: Adapter = None,
    sharding: Zero = None,
    serve: Serve = False,
    weights: Weights = "bf16",
    own: Own = None,
    kwh: Kwh = None,
    mfu: Mfu = None,
    price: Price = None,
    storage: Rate = None,
    smallest: Smallest = False,
    largest: Largest = False,
    plot: Plot = None,
    dry: Dry = False,
    as_json: Json = False,
) -> None:
    """Tell whether a run fits, which layout to use, and what it costs.

    --model plans a usual run: 20 tokens per parameter, or with --adapter 1,875 fine-tuning steps.

    The exit code is 0 if there is an answer, even if nothing fits, and 2 if the question is wrong.
    """
    from pipelines.planning.hardware_table import named

    _refuse_unused(context)
    hardware = named(gpu)
    if mfu is not None:
        hardware = replace(hardware, mfu=mfu)
    resolved, shape = _question(model, recipe, overrides or [], hardware, gpus, adapter, sharding)
    number = gpus or _workers(resolved, recipe, hardware)
    if serve:
        from pipelines.planning.serving_plan import Owned

        owned = None if own is None or kwh is None else Owned(own, kwh)
        _serve(shape, hardware, gpus, weights, price, owned, storage, as_json=as_json)
        return
    if smallest or largest:
        _sizes(resolved, shape, hardware, number, smallest=smallest, as_json=as_json)
        return
    from pipelines.planning.plan import Machine, plan_json
    from pipelines.planning.plan import plan as make_plan

    machine = Machine(hardware, number, _storage(storage), price)
    found = make_plan(resolved, shape, machine, any_layout=recipe is None)
    if plot is not None:
        _plot(found, plot)
    tried = _dry_run(found, shape) if dry else None
    if as_json:
        values = plan_json(found) | ({"dry_run": tried} if tried else {})
        typer.echo(json.dumps(values, indent=2))
        return
    from pipelines.commands.plan_output import print_plan

    print_plan(found, f"{resolved.name}, {shape.parameters / 1e9:.3g}B parameters", gpu)
    if tried:
        from pipelines.commands.dry_run_output import print_dry_run

        print_dry_run(tried)


def _dry_run(found: "Plan", shape: "DecoderConfig") -> dict[str, Any]:
    """Return the report of the plan's first layout as plain values."""
    from pipelines.stages.run_plan import dry_run_plan

    return dry_run_plan(found, shape)


def _refuse_unused(context: typer.Context) -> None:
    """Refuse options that would have no effect.

    Raises:
        UserError: Such an option is given, or only one of --own and --kwh.
    """
    there = [each.opts[0] for each in context.command.params if _is_given(context, each.name)]
    questions = [name for name in _UNUSED if name in there]
    if "--serve" not in there:
        questions.append(_TRAINING)
    for question in questions:
        if unused := [name for name in _UNUSED[question] if name in there]:
            raise UserError(f"plan: {question} does not use {', '.join(unused)}; leave it out")
    if ("--own" in there) != ("--kwh" in there):
        raise UserError("plan: give both --own and --kwh: a GPU that you buy needs power")


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name) if name else None
    return source is not None and source.name == "COMMANDLINE"


def _question(
    model: str | None,
    recipe: str | None,
    overrides: list[str],
    hardware: "Hardware",
    gpus: int | None,
    adapter: str | None,
    sharding: str | None,
) -> tuple["Recipe", "DecoderConfig"]:
    """Return the recipe of the run to plan, and the shape of its model."""
    from pipelines.models.presets import preset
    from pipelines.planning.cost import usual_values
    from pipelines.recipe.recipe_files import (
        load_recipe,
        override_values,
        parse_overrides,
        parse_recipe,
    )
    from pipelines.recipe.section import registered_label
    from pipelines.stages.run_plan import shape_beforehand

    asked = list(overrides)
    asked += [f"adapter.kind={adapter}"] if adapter else []
    asked += [f"parallel.sharding={sharding}"] if sharding else []
    if recipe is not None:
        resolved = load_recipe(recipe, asked)
        if registered_label(resolved.model.init_from) and not model:
            from pipelines.registry.parents import name_versions, with_folders

            resolved = with_folders(name_versions(resolved))
        return resolved, _of_preset(model, resolved) if model else shape_beforehand(resolved)
    if model is None:
        raise UserError("plan: give a run to plan with --model PRESET or --recipe R")
    shape = preset(model)
    number = gpus or hardware.devices_per_node
    usual = usual_values(model, shape, hardware, number, adapter or "none")
    resolved = override_values(parse_recipe(usual), parse_overrides("\n".join(asked)))
    if not shape.vocab_size:
        return resolved, shape_beforehand(resolved)
    return resolved, _of_preset(model, resolved)


def _of_preset(model: str, recipe: "Recipe") -> "DecoderConfig":
    """Return a preset's shape; one that is trained from scratch has the context that is asked for.

    Raises:
        UserError: it is trained further, and its context is too short.
    """
    from pipelines.models.presets import preset

    shape, length = preset(model), recipe.data.sequence_length
    if not 0 < shape.context_length < length:
        return shape
    if recipe.model.init_from is not None or recipe.adapter.kind != "none":
        raise UserError(
            f"plan: the context of {model} is {shape.context_length} tokens, but "
            f"data.sequence_length = {length}; set at most {shape.context_length}"
        )
    return shape.sized(shape.vocab_size, length)


def _workers(resolved: "Recipe", recipe: str | None, hardware: "Hardware") -> int:
    if recipe is None:
        return hardware.devices_per_node
    return resolved.resources.most_workers


def _storage(rate: float | None) -> "Storage | None":
    from pipelines.planning.storage_needs import Storage

    return None if rate is None else Storage(rate * _GIGA, rate * _GIGA)


def _serve(
    shape: "DecoderConfig",
    hardware: "Hardware",
    gpus: int | None,
    weights: Literal["bf16", "int8", "int4"],
    price: float | None,
    owned: "Owned | None",
    storage: float | None,
    *,
    as_json: bool,
) -> None:
    from pipelines.commands.plan_output import print_serving
    from pipelines.planning.serving_plan import serving_plan

    rate = (storage or 1.0) * _GIGA
    answer: dict[str, object] = {"fits": False, "why_not": None, "storage_bandwidth": rate}
    try:
        found = serving_plan(
            shape,
            hardware,
            weights=weights,
            storage_bandwidth=rate,
            hourly_price=price,
            owned=owned,
        )
    except UserError as error:
        answer["why_not"] = str(error)
    else:
        answer |= asdict(found) | {"fits": True}
        if gpus is not None and found.devices > gpus:
            why = f"a replica needs {found.devices} GPUs of a node, and there are {gpus}"
            answer |= {"fits": False, "why_not": why}
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        print_serving(answer)


def _sizes(
    resolved: "Recipe",
    shape: "DecoderConfig",
    hardware: "Hardware",
    gpus: int,
    *,
    smallest: bool,
    as_json: bool,
) -> None:
    """Print the smallest machines for a run, or the largest model for a machine."""
    from pipelines.models.presets import PRESETS
    from pipelines.planning.hardware_table import entries
    from pipelines.planning.layout_search import largest_model, smallest_machine

    if smallest:
        answer = {
            name: str(number) for name, number in smallest_machine(resolved, shape, entries())
        }
    else:
        published = {name: each for name, each in PRESETS.items() if each.vocab_size}
        answer = largest_model(resolved, published, hardware, gpus)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    for name, value in answer.items():
        typer.echo(f"{name:<14}{value}")


def _plot(found: "Plan", path: Path) -> None:
    from pipelines.commands.plan_output import draw_memory

    draw_memory(found, path)
    typer.echo(f"the memory plot is in {path}", err=True)

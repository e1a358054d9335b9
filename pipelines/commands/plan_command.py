"""`penstock plan`: does it fit, how long, how much, with which layout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
_RUN = ("--price", "--storage", "--mfu", "--plot")
# What a question makes no use of.
_UNUSED = {
    "--serve": ("--adapter", "--sharding", "--mfu", "--plot", "--smallest", "--largest"),
    "--smallest": ("--largest", "--gpu", "--gpus", *_RUN),
    "--largest": ("--adapter", *_RUN),
    _TRAINING: ("--weights", "--own", "--kwh"),
}

Preset = Annotated[str | None, typer.Option(help="A preset: gpt3-175b, llama3-70b, gpt2-124m, ...")]
GivenRecipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", metavar="R", help="A shipped recipe, or a YAML file."),
]
Gpu = Annotated[str, typer.Option(help="h200, a100-80, rtx4090, mi300x, cpu, ...")]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="How many; else the recipe's workers, or one node.")
]
Adapter = Annotated[Literal["none", "lora", "qlora"] | None, typer.Option()]
Zero = Annotated[Literal["none", "optimizer", "gradients", "full"] | None, typer.Option()]
Serve = Annotated[bool, typer.Option("--serve", help="Serving instead of training.")]
Weights = Annotated[Literal["bf16", "int8", "int4"], typer.Option(help="Of the served model.")]
Own = Annotated[
    float | None, typer.Option(min=0, help="Serving: USD for which a GPU is bought, with its host.")
]
Kwh = Annotated[float | None, typer.Option(min=0, help="Beside --own: USD for a kWh.")]
Mfu = Annotated[
    float | None, typer.Option(min=0.01, max=0.99, help="That this GPU reaches on a 3B, one node.")
]
Price = Annotated[float | None, typer.Option(min=0, help="Of one GPU an hour.")]
Rate = Annotated[
    float | None, typer.Option(min=0.001, help="GB/s that all nodes share, read and write.")
]
Smallest = Annotated[
    bool, typer.Option("--smallest", help="The fewest of each GPU on which it runs.")
]
Largest = Annotated[
    bool, typer.Option("--largest", help="The largest preset that these GPUs train.")
]
Plot = Annotated[
    Path | None, typer.Option(help="Memory by part of each layout: a .png or .html file.")
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
    as_json: Json = False,
) -> None:
    """Say whether a run fits, how to lay it out, and what it costs.

    With --model a usual run: 20 tokens a parameter, or with --adapter a fine-tuning of 1,875 steps.

    Exit code 0 where there is an answer, and so where it is that nothing fits; 2 where the question
    is wrong.
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
    if as_json:
        typer.echo(json.dumps(plan_json(found), indent=2))
        return
    from pipelines.commands.plan_output import print_plan

    print_plan(found, f"{resolved.name}, {shape.parameters / 1e9:.3g}B parameters", gpu)


def _refuse_unused(context: typer.Context) -> None:
    """Refuse options that would change nothing.

    Raises:
        UserError: one is given, or --own without --kwh.
    """
    there = [each.opts[0] for each in context.command.params if _is_given(context, each.name)]
    questions = [name for name in _UNUSED if name in there]
    if "--serve" not in there:
        questions.append(_TRAINING)
    for question in questions:
        if unused := [name for name in _UNUSED[question] if name in there]:
            raise UserError(f"plan: {question} makes no use of {', '.join(unused)}; leave it out")
    if ("--own" in there) != ("--kwh" in there):
        raise UserError("plan: --own and --kwh go together: a GPU that is bought needs power")


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
    """The run that is asked about, and the shape of its model."""
    from pipelines.models.presets import preset
    from pipelines.planning.cost import usual_values
    from pipelines.recipe.recipe_files import (
        load_recipe,
        override_values,
        parse_overrides,
        parse_recipe,
    )
    from pipelines.stages.run_plan import shape_beforehand

    asked = list(overrides)
    asked += [f"adapter.kind={adapter}"] if adapter else []
    asked += [f"parallel.sharding={sharding}"] if sharding else []
    if recipe is not None:
        resolved = load_recipe(recipe, asked)
        return resolved, preset(model) if model else shape_beforehand(resolved)
    if model is None:
        raise UserError("plan: of what? --model PRESET, or --recipe R")
    shape = preset(model)
    number = gpus or hardware.devices_per_node
    usual = usual_values(model, shape, hardware, number, adapter or "none")
    resolved = override_values(parse_recipe(usual), parse_overrides("\n".join(asked)))
    return resolved, shape if shape.vocab_size else shape_beforehand(resolved)


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
            why = f"a replica takes {found.devices} GPUs of a node, and there are {gpus}"
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
    """The smallest machines of a run, or the largest model of a machine."""
    from pipelines.models.presets import PRESETS
    from pipelines.planning.hardware_table import ENTRIES
    from pipelines.planning.layout_search import largest_model, smallest_machine

    if smallest:
        answer = {name: str(number) for name, number in smallest_machine(resolved, shape, ENTRIES)}
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
    typer.echo(f"memory by part in {path}", err=True)

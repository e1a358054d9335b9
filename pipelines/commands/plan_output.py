"""Printing of a plan, and a plot of each layout's memory by part against a device's memory."""

import html
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.core.errors import UserError
from pipelines.planning.layout_search import GIB, Candidate, nearest, ways
from pipelines.planning.memory_training import SHARDINGS
from pipelines.planning.plan import Forecast, Plan

_MOST = 10  # layouts in the table
_GIGA = 1e9
_DAY = 24.0
_WIDTH = 100  # if the output is not a terminal
_PARTS = {
    "weights": "weights",
    "grads": "gradients",
    "optim": "optimizer",
    "activ": "activations",
    "logits": "logits",
}


def print_plan(plan: Plan, run: str, gpu: str) -> None:
    """Print the answer first, then the forecast, then the layouts."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    machine, best = plan.machine, plan.asked[0]
    where = f"{machine.gpus} x {gpu}" + (f" in {machine.nodes} nodes" if machine.nodes > 1 else "")
    console.print(f"{escape(run)} on {where}")
    if plan.forecast is not None:
        console.print(f"[bold green]fits[/]      {escape(best.name)}{_micro_batch(best)}")
        _print_forecast(console, plan, plan.forecast)
    else:
        console.print(f"[bold red]does not fit[/]: {escape(best.name)}: {best.why_not}")
    for line in plan.settled:
        console.print(f"settled   {escape(line)}")
    console.print()
    console.print(_layouts(plan))
    possible = sum(each.fits for each in plan.layouts)
    console.print(f"[dim]{possible} of {len(plan.layouts)} layouts fit; all with --json[/]")


def print_serving(answer: dict[str, Any]) -> None:
    """Print the plan of one replica, line by line."""
    console = Console(highlight=False)
    if not answer["fits"]:
        console.print(f"[bold red]does not fit[/]: {escape(answer['why_not'])}")
        return
    memory = {part: size / GIB for part, size in answer["memory"].items()}
    console.print(f"[bold green]fits[/]        {answer['devices']} GPUs per replica")
    parts = ", ".join(f"{part} {size:.1f}" for part, size in memory.items())
    console.print(f"GiB a GPU   {parts}")
    console.print(f"at once     {answer['concurrency']} sequences")
    console.print(
        f"tokens/s    {answer['tokens_per_second']:,.0f} of all, "
        f"{answer['stream_tokens_per_second']:.0f} of one alone, at most; bound by "
        f"{answer['bound_by']}"
    )
    console.print(
        f"start       {answer['cold_start_seconds']:.0f} s at "
        f"{answer['storage_bandwidth'] / _GIGA:g} GB/s; first token "
        f"{answer['first_token_seconds']:.2f} s"
    )
    for name, cost in (("rented", answer["rented"]), ("bought", answer["bought"])):
        if cost:
            console.print(
                f"USD {name}  {cost['instance_month']:,.0f} a month, {cost['user_month']:,.2f} a "
                f"user, {cost['million_tokens']:.2f} a million tokens"
            )


def _print_forecast(console: Console, plan: Plan, forecast: Forecast) -> None:
    price = plan.machine.price_per_hour
    cost = forecast.cost
    money = "no price: give --price" if cost is None else f"${cost:,.0f} at ${price:,.2f} an hour"
    assumed = " (assumed: none is published)" if plan.machine.hardware.mfu is None else ""
    size, failures = forecast.checkpoint.total / GIB, forecast.failures
    every = max(1, min(forecast.steps, round(failures.interval_seconds / forecast.step_seconds)))
    console.print(
        f"step      {forecast.step_seconds:.3g} s, {forecast.tokens_per_second:,.0f} tokens/s, MFU "
        f"{forecast.mfu:.0%}{assumed}; {forecast.bound_share:.0%} is {forecast.bound_by}"
    )
    console.print(
        f"run       {forecast.steps:,} steps, {forecast.flops:.3g} FLOPs, "
        f"{_duration(forecast.hours)}, {money}, {forecast.kwh:,.0f} kWh"
    )
    console.print(
        f"failures  {failures.restarts:.2g} restarts; a checkpoint, {size:.3g} GiB, stalls "
        f"{forecast.stall_seconds:.1f} s: best every {every:,} steps"
    )
    needs = []
    for demand in forecast.demands:
        verdict = {True: "", False: " [red](too much)[/]", None: ""}[demand.holds]
        needs.append(f"{demand.name} {demand.wanted / _GIGA:.3g}{verdict}")
    given = forecast.demands[0].given
    of = "" if given is None else f", of {given / _GIGA:.3g} that it gets"
    console.print(f"storage   GB/s a node: {', '.join(needs)}{of}")


def _layouts(plan: Plan) -> Table:
    """Return a table of the fastest layouts that fit, then those nearest to fitting."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("layout", "ZeRO", "recompute"):
        table.add_column(name, no_wrap=True)
    columns = ("batch", "s/step", *_PARTS, "rest", "GiB")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    shown = [each for each in plan.layouts if each.choice is not None and each.fits][:_MOST]
    for each in shown + nearest(plan.layouts):
        if each.choice is None or each.step is None:
            continue
        memory, training = each.choice.memory, each.choice.training
        sizes = [getattr(memory, part) for part in _PARTS.values()]
        gib = [f"{size / GIB:.1f}" for size in (*sizes, memory.total - sum(sizes), memory.total)]
        if not each.fits:
            gib[-1] = f"[red]{gib[-1]}[/]"
        table.add_row(
            ways(training),
            str(SHARDINGS.index(training.sharding)),
            training.activation_checkpoint,
            str(training.micro_batch),
            f"{each.step.total:.3g}",
            *gib,
        )
    return table


def _micro_batch(candidate: Candidate) -> str:
    choice = candidate.choice
    return "" if choice is None else f", micro-batch {choice.training.micro_batch}"


def _duration(hours: float) -> str:
    if hours >= 2 * _DAY:
        return f"{hours / _DAY:,.1f} days"
    return f"{hours:.2g} hours" if hours >= 1 else f"{hours * 60:.2g} minutes"


_MOST_BARS = 12  # layouts in one picture
_INK = "#808080"  # visible on a light page and on a dark one
# In the order of `Memory.parts`; colour-blind people can tell Okabe and Ito's colours apart.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#b0b0b0")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px sans-serif; margin: 2rem; color-scheme: light dark }}
svg {{ max-width: 100%; height: auto }}</style>
<h1>{title}</h1>
{picture}
</html>
"""


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw one stacked bar per layout, fitting layouts first, as a PNG or an HTML page.

    Raises:
        UserError: The file's name ends in neither .png nor .html, or no layout is possible.
    """
    if path.suffix not in (".png", ".html"):
        raise UserError(f"--plot {path}: the name must end in .png or .html")
    shown = [each for each in plan.layouts if each.choice is not None][:_MOST_BARS]
    if not shown:
        raise UserError(f"--plot {path}: no layout divides the model, so there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(shown)
    parts = [each.choice.memory.parts for each in shown if each.choice is not None]
    for part, colour in zip(parts[0], _COLOURS, strict=True):
        sizes = [memory[part] / GIB for memory in parts]
        axes.barh(range(len(shown)), sizes, left=lefts, color=colour, label=part)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    axes.set_yticks(range(len(shown)), [each.name for each in shown], color=_INK)
    axes.invert_yaxis()
    axes.axvline(plan.machine.hardware.memory_bytes / GIB, color=_INK, linestyle="--")
    axes.set_xlabel("GiB per device; dashed: the device's memory", color=_INK)
    axes.tick_params(colors=_INK)
    axes.spines[:].set_visible(False)
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(ncols=len(_COLOURS), frameon=False, labelcolor=_INK, **where)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        figure.savefig(path, dpi=160)
        return
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True)
    title = f"Memory of {len(shown)} layouts on {plan.machine.gpus} x {plan.machine.hardware.name}"
    picture = text.getvalue().partition("<svg")
    path.write_text(_PAGE.format(title=html.escape(title), picture="<svg" + picture[2]))

"""`penstock doctor`: what is wrong on this machine, why it matters, and how to fix it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import Json, Overrides, RecipeName
from pipelines.core.settings import DEFAULT_RECIPE

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.doctor.findings import Finding

_MARKS = {
    "ok": "[green]✔[/]",
    "not here": "[dim]-[/]",
    "warning": "[yellow]![/]",
    "problem": "[red]✘[/]",
}


def doctor(
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Overrides = None,
    s3: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Test only this bucket: every operation that is needed."),
    ] = None,
    fence: Annotated[
        bool,
        typer.Option("--fence", help="Let a node with a problem of its own take no more work."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check driver, GPUs, network, disk and services, on every node.

    The exit code is 0 if all is well or not here, 1 with a warning, 2 with a problem.
    """
    import json
    import time
    from dataclasses import asdict

    from pipelines.doctor.examination import examine
    from pipelines.doctor.findings import exit_code, worst
    from pipelines.doctor.object_store_check import examine_store
    from pipelines.recipe.recipe_files import load_recipe

    began = time.monotonic()
    parts = (
        {s3: examine_store(s3)}
        if s3
        else examine(load_recipe(recipe, overrides or ()), fence=fence)
    )
    findings = [finding for part in parts.values() for finding in part]
    if as_json:
        told = {
            "state": worst(findings),
            "exit_code": exit_code(findings),
            "seconds": round(time.monotonic() - began, 2),
            "parts": {name: [asdict(each) for each in part] for name, part in parts.items()},
        }
        typer.echo(json.dumps(told, indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for name, part in parts.items():
            _show(console, name, part)
        console.print(_sum(findings))
    raise typer.Exit(exit_code(findings))


def _show(console: "Console", name: str, findings: "Sequence[Finding]") -> None:
    from rich.markup import escape

    console.print(f"\n[bold]{escape(name)}[/]")
    for each in findings:
        console.print(f"{_MARKS[each.state]} {each.check}: {escape(each.saw)}", soft_wrap=True)
        if each.state == "not here":
            continue
        console.print(f"  [dim]why: {escape(each.why)}[/]", soft_wrap=True)
        if each.fix:
            console.print(f"  [bold]fix:[/] {escape(each.fix)}", soft_wrap=True)


def _sum(findings: "Sequence[Finding]") -> str:
    from collections import Counter

    counts = Counter(str(finding.state) for finding in findings)
    return "\n" + ", ".join(f"{counts[state]} {state}" for state in _MARKS if counts[state])

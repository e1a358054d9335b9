"""What a user sees of a run: live progress bars, then a short summary."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from pipelines.core.settings import Settings
from pipelines.platform.dag_runs import Summary, page
from pipelines.run.progress import Progress
from pipelines.run.records import EvaluateRecord, RegisterRecord
from pipelines.run.workspace import workspace_path

_MARKS = {"success": "[green]✔[/]", "failed": "[red]✘[/]", "up_for_retry": "[yellow]↻[/]"}


def show_progress(
    events: Iterable[tuple[str, str] | Progress], run_page: str, *, to_stderr: bool
) -> None:
    """Draw one bar per stage; without a terminal, print one line for each stage that ends."""
    console = Console(stderr=to_stderr, highlight=False)
    columns = (
        TextColumn("  {task.fields[mark]} {task.description:<11}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        rows: dict[str, TaskID] = {}
        for event in events:
            if isinstance(event, Progress):
                if event.stage in rows:
                    text = event.line().removeprefix(f"{event.stage} ")
                    bars.update(
                        rows[event.stage], total=event.total, completed=event.done, text=text
                    )
                continue
            name, state = event
            if state in ("running", "deferred") and name not in rows:
                rows[name] = bars.add_task(name, total=None, mark=" ", text="")
            elif state == "awaiting_input":
                where = f"{run_page}/tasks/{name}/required_actions"
                console.print(f"  [yellow]?[/] {name} waits for an answer: {where}", soft_wrap=True)
            elif state in _MARKS:
                _end_row(bars, rows, name, state)
                if not console.is_terminal:
                    console.print(f"  {_MARKS[state]} {name}")


def print_summary(summary: Summary, settings: Settings) -> None:
    """Print the model's scores and verdict, the addresses of the pages and a sample."""
    console = Console(highlight=False)
    workspace = workspace_path(settings.runs, summary.dag_run_id)
    evaluate, register = EvaluateRecord.read(workspace), RegisterRecord.read(workspace)
    console.print(_scores(evaluate))
    verdict = register.verdict
    console.print(f"verdict   [bold]{verdict.decision}[/]: {escape(verdict.reason)}")
    if verdict.warning:
        console.print(f"[yellow]warning[/]   {escape(verdict.warning)}")
    if model := register.model:
        aliases = ", ".join(f"@{alias}" for alias in model.aliases)
        console.print(f"model     [bold]{model.name}[/] version {model.version} {aliases}")
    cached = [name for name, stage in summary.stages.items() if stage.cached]
    if cached:
        console.print(f"cached    {', '.join(cached)}")
    console.print(
        f"Airflow   {page(settings, summary.dag_run_id)}\n"
        f"          user {settings.airflow_user}, password in {settings.airflow_password_path}\n"
        f"MLflow    {settings.mlflow_url}",
        soft_wrap=True,
    )
    if evaluate.samples:
        console.print("\nthe model writes:\n", style="bold")
        console.print(escape(evaluate.samples[0]), style="dim")


def _end_row(bars: Bars, rows: dict[str, TaskID], name: str, state: str) -> None:
    if name not in rows:
        rows[name] = bars.add_task(name, total=1, mark=" ", text="")
    total = bars.tasks[rows[name]].total or 1
    bars.update(rows[name], mark=_MARKS[state], total=total, completed=total)


def _scores(evaluate: EvaluateRecord) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("bits per byte of held-out text, lower is better")
    table.add_column("", justify="right")
    rows = {"this model": evaluate.bits_per_byte, **evaluate.baselines}
    for name, value in sorted(rows.items(), key=lambda row: row[1]):
        style = "bold green" if name == "this model" else ""
        table.add_row(name, f"{value:.3f}", style=style)
    return table

"""`penstock`: the entry point. Each command is a function in pipelines.commands.

No slow module is imported here: a command imports what it needs when it runs.
"""

import sys

import typer

from pipelines.commands import (
    backup_commands,
    bench,
    data,
    doctor,
    export,
    gc,
    init,
    models,
    plan_command,
    recipes,
    report,
    run,
    serve,
    up_and_down,
)
from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.product import CODE
from pipelines.core.settings import bypass_proxy_on_loopback

app = typer.Typer(
    name="penstock",
    help="Text in; a registered, evaluated, reproducible language model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing the help would take longer than everything else
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(init.init)
app.command()(run.run)
app.command()(run.stage)
app.command()(run.explain)
app.command()(report.report)
app.command()(report.why)
app.command()(plan_command.plan)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
models.app.command()(export.export)
app.add_typer(models.app, name="models")
app.command()(serve.serve)
for command in (
    up_and_down.up,
    up_and_down.down,
    up_and_down.status,
    up_and_down.env,
    up_and_down.logs,
    gc.gc,
    backup_commands.backup,
    backup_commands.restore,
):
    app.command()(command)
app.command()(doctor.doctor)
app.command()(bench.bench)


def main() -> None:
    """Run the command; report a user's mistake as one line on stderr and exit code 2."""
    bypass_proxy_on_loopback()
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *CODE):
            raise
        typer.echo(
            f"error: this command needs the package {package}: install Penstock's wheel with its "
            "extra `laptop`, as the README.md of your project says",
            err=True,
        )
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()

"""The command's outside: its help, its errors, its exit statuses."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from resilient_sdk import __version__
from resilient_sdk.cli.demo import demo
from resilient_sdk.cli.look import logs, ps, status
from resilient_sdk.cli.run import attach, run, stop
from resilient_sdk.cli.terminal import EXIT_DEFECT, EXIT_INTERRUPTED, EXIT_STATUSES, say, show
from resilient_sdk.errors import ResilientError


class Commands(TyperGroup):
    """Every error that we raise on purpose is one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ResilientError as problem:
            if ctx.params.get("debug"):
                raise
            say(f"resilient: {problem}", "red")
            raise typer.Exit(problem.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    name="resilient",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_STATUSES,
)


@app.callback()
def resilient(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """DeepSpeed training that survives crashed ranks, bit for bit."""


@app.command()
def version() -> None:
    """Print the version."""
    show(__version__)


# torchrun takes every option with - and with _; a script's own options follow the script, untouched.
_PASS_ON = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
app.command(context_settings=_PASS_ON, epilog=EXIT_STATUSES)(run)
app.command(epilog=EXIT_STATUSES)(attach)
app.command()(ps)
app.command()(status)
app.command()(logs)
app.command()(stop)
app.command(epilog="Exit status: 0 identical · 1 not identical, or the training failed · 2 wrong usage.")(
    demo
)


def main() -> None:
    """The entry of the `resilient` script."""
    try:
        app()
    except Exception as problem:  # the last line of defence of a command
        if "--debug" in sys.argv:
            raise
        say(
            f"resilient: defect: {type(problem).__name__}: {problem}. `resilient --debug ...` shows where.",
            "red",
        )
        sys.exit(EXIT_DEFECT)

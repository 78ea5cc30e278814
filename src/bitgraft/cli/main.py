"""`bitgraft`: the commands, and what happens when one goes wrong."""

import os
import sys
from typing import Annotated

import typer

from bitgraft import __version__
from bitgraft.cli import anatomy, inspect, methods, params
from bitgraft.errors import BitgraftError

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of the click inside typer, or of the one beside it
USAGE, FAILURE, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 1

app = typer.Typer(
    name="bitgraft",
    help="New tasks for one pretrained network, about one bit per weight each, with no forgetting.",
    epilog="\b\nTry:\n  bitgraft anatomy resnet50\n  bitgraft params\n  bitgraft methods",
    rich_markup_mode=None,  # help that pastes well and reads the same through a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"bitgraft {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(epilog=anatomy.TRY)(anatomy.anatomy)
app.command(epilog=inspect.TRY)(inspect.inspect)
app.command(epilog=params.TRY)(params.params)
app.command(epilog=methods.TRY)(methods.methods)


def main() -> None:
    """Run the command line: one sentence and an exit code for whatever a user can mend, never a traceback."""
    try:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without ∘ still gets its table
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        code = _complain(_sentence(error), USAGE)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush finds an open end
        code = CLOSED_PIPE
    except BitgraftError as error:
        code = _complain(str(error), _exit_code(error))
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    if "Network(" in message:
        message += " (on the command line: --head LAYER, --example 1,3,64,64)"
    print(f"error: {message}", file=sys.stderr)
    return code


def _sentence(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "bitgraft"
    return f"{error.format_message().rstrip('.')}; `{command} --help` tells more"  # type: ignore[attr-defined]


def _exit_code(error: BitgraftError) -> int:
    from bitgraft.loading import UnknownBackboneError  # torch is there already when something has gone wrong

    return USAGE if isinstance(error, UnknownBackboneError) else FAILURE

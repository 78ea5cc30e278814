"""`bitgraft`: the commands, and what happens when one goes wrong."""

import os
import sys
import time
from typing import Annotated

import typer

from bitgraft import __version__
from bitgraft.cli import (
    anatomy,
    bench,
    compress,
    data,
    demo,
    evaluate,
    export,
    inspect,
    methods,
    params,
    predict,
    pull,
    push,
    report,
    score,
    serve,
    tasks,
    train,
)
from bitgraft.cli.output import CLOSED_PIPE, FAILURE, INTERRUPTED, USAGE
from bitgraft.errors import BitgraftError, UnknownBackboneError

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of the click inside typer, or of the one beside it
LINGER = 5.0  # seconds

app = typer.Typer(
    name="bitgraft",
    help="New tasks for one pretrained network, about one bit per weight each, with no forgetting.",
    epilog="\b\nTry:\n  bitgraft train photos --task flowers --backbone resnet50\n  bitgraft tasks\n  bitgraft demo",
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


app.command(epilog=train.TRY)(train.train)
app.command("eval", epilog=evaluate.TRY)(evaluate.evaluate)
app.command(epilog=predict.TRY)(predict.predict)
app.command(epilog=tasks.TRY)(tasks.tasks)
app.command(epilog=export.TRY)(export.export)
app.command(epilog=compress.TRY)(compress.compress)
app.command(epilog=push.TRY)(push.push)
app.command(epilog=pull.TRY)(pull.pull)
app.command(epilog=demo.TRY)(demo.demo)
app.command(epilog=anatomy.TRY)(anatomy.anatomy)
app.command(epilog=inspect.TRY)(inspect.inspect)
app.command(epilog=params.TRY)(params.params)
app.command(epilog=methods.TRY)(methods.methods)
app.command(epilog=bench.TRY)(bench.bench)
app.add_typer(data.app, name="data")
app.command(epilog=score.TRY)(score.score)
app.command(epilog=serve.TRY)(serve.serve)
app.command(epilog=report.TRY)(report.report)


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
    except OSError as error:
        code = _complain(str(error), FAILURE)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    if "Network(" in message and sys.argv[1:2] in (["anatomy"], ["params"]):
        message += " (on the command line: --head LAYER, --example 1,3,64,64)"
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # of several processes the first speaks; the launcher ends the others, if they have the same to say
        time.sleep(LINGER)
        message = f"process {rank}: {message}"
    print(f"error: {message}\n", end="", file=sys.stderr, flush=True)
    return code


def _sentence(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "bitgraft"
    return f"{error.format_message().rstrip('.')}; `{command} --help` tells more"  # type: ignore[attr-defined]


def _exit_code(error: BitgraftError) -> int:
    return USAGE if isinstance(error, UnknownBackboneError) else FAILURE

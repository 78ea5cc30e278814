"""`bitgraft`: all commands, and what happens when one goes wrong."""

import os
import sys
import time
from importlib import import_module

import typer

from bitgraft.cli.app import app
from bitgraft.cli.output import FAILURE, INTERRUPTED, USAGE
from bitgraft.errors import BitgraftError, UnknownBackboneError
from bitgraft.runtime.memory import keep_freed_memory

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of the click inside typer, or of the one beside it
LINGER = 5.0  # seconds
MODULES = "train predict identify tasks export compress sharing serve backbone paper"  # in the order of the help

for name in MODULES.split():
    import_module(f"bitgraft.cli.{name}")


def main() -> None:
    """Run the command line: mistakes become one sentence and an exit code, never a traceback."""
    keep_freed_memory()
    try:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without ∘ still gets its table
        code = app(prog_name="bitgraft", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "bitgraft"
        said = error.format_message().rstrip(".").replace(": Value error, ", ": ")  # type: ignore[attr-defined]
        said = said.removeprefix("Invalid value: ")
        code = _complain(f"{said}{'' if said.endswith('?') else ';'} see `{command} --help`", USAGE)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        code = FAILURE
    except (BitgraftError, OSError) as error:
        code = _complain(str(error), USAGE if isinstance(error, UnknownBackboneError) else FAILURE)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    if "Network(" in message and sys.argv[1:2] in (["anatomy"], ["params"]):
        message += " (on the command line: --head LAYER, --example 1,3,64,64)"
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # the first process speaks; the launcher ends the others if they have the same to say
        time.sleep(LINGER)
        message = f"process {rank}: {message}"
    print(f"error: {message}\n", end="", file=sys.stderr, flush=True)
    return code

"""The entry point: all commands, and how their errors are reported."""

import os
import re
import sys
import time
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer

from bitgraft.cli.app import app
from bitgraft.cli.output import FAILURE, INTERRUPTED, USAGE
from bitgraft.errors import BitgraftError, UnknownBackboneError
from bitgraft.runtime.memory import keep_freed_memory

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer has no public name for it
LINGER = 5.0  # seconds
MODULES = "train predict tasks export compress sharing serve backbone paper"  # in the order of the help
PLAIN_WORDS = (  # typer's messages, reworded one after the other
    (r"^Invalid value: ", ""),
    (r"^Invalid value for '?([^':]+)'?: ", r"\1: "),
    (r": Value error, ", ": "),
    (r": Input should be greater than or equal to (.+)", r" must be at least \1"),
    (r": Input should be less than or equal to (.+)", r" must be at most \1"),
    (r": Input should be a valid integer.*", " must be a whole number"),
    (r": Input should be a valid number.*", " must be a number"),
    (r": '(.*)' is not one of (.+)", r" must be one of \2, not '\1'"),
    (r"^Missing (argument|option) '?([^']+)'?", r"missing \1 \2"),
    (r"^Option '(.+)' requires an argument", r"\1 needs a value"),
    (r"^Got unexpected extra argument\(s\) \((.*)\)", r"unexpected argument: \1"),
    (r"^No such (option:|command) '?([^' ]+)'?", lambda found: f"there is no {found[1].rstrip(':')} {found[2]}"),
    (r" \(Possible options: (.*)\)", r"; did you mean \1?"),
    (r"\. Did you mean '(.*)'\?", r"; did you mean \1?"),
)

for name in MODULES.split():
    import_module(f"bitgraft.cli.{name}")


def main() -> None:
    """Run the command line. A user's mistake is reported in one sentence with an exit code, never as a traceback."""
    keep_freed_memory()
    try:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every terminal can print ∘
        code = app(prog_name="bitgraft", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        code = _complain(_usage(error), USAGE)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        code = FAILURE
    except (BitgraftError, OSError) as error:
        code = _complain(str(error), USAGE if isinstance(error, UnknownBackboneError) else FAILURE)
    _end_process_group(code or 0)
    sys.exit(code)


def _end_process_group(code: int) -> None:
    """End one of several processes here: threads of gloo live on even when the group is destroyed, and can abort the
    interpreter as it ends ("terminate called without an active exception", pytorch pull request 179291)."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)  # not imported by every command
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if code == 0:  # after an error, others may never come to this
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _usage(error: Any) -> str:
    message = error.format_message().rstrip(".")
    for pattern, plain in PLAIN_WORDS:
        message = re.sub(pattern, plain, message)
    if hint := re.match(r"there is no option (--\S+)(; did you mean (.*)\?)$", message):  # typer's are often far off
        close = get_close_matches(hint[1][2:], [word[2:] for word in hint[3].split(", ")], 1)
        message = message.removesuffix(hint[2]) + "".join(f"; did you mean --{word}?" for word in close)
    command = "bitgraft" if error.ctx is None else error.ctx.command_path
    if error.ctx is None and not sys.argv[1].startswith("-"):  # typer drops the context of an option without a value
        command = f"bitgraft {sys.argv[1]}"
    return f"{message}{'' if message.endswith('?') else ';'} see `{command} --help`"


def _complain(message: str, code: int) -> int:
    if "Network(" in message and sys.argv[1:2] in (["anatomy"], ["params"]):
        message += " (on the command line: --head LAYER, --example 1,3,64,64)"
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # usually rank 0 reports the same error, and the launcher then ends this process
        time.sleep(LINGER)
        message = f"process {rank}: {message}"
    print(f"error: {message}\n", end="", file=sys.stderr, flush=True)
    return code

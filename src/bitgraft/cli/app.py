"""The program `bitgraft`, to which each module adds its commands."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from bitgraft import __version__

app = typer.Typer(
    name="bitgraft",
    help="New tasks for one pretrained network, about one bit per weight each, with no forgetting.",
    epilog="\b\nTry:\n  bitgraft train photos --task flowers --backbone resnet50\n  bitgraft tasks\n  bitgraft demo",
    rich_markup_mode=None,  # help that pastes well and reads the same through a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(lines: str, name: str | None = None, to: typer.Typer = app) -> Callable[[Any], Any]:
    """Makes a function a command whose help ends with these lines to paste."""
    return to.command(name, epilog="\b\nTry:" + lines)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"bitgraft {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())

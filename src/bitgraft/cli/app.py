"""The `bitgraft` program; each module adds its commands to it."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from bitgraft import __version__

app = typer.Typer(
    name="bitgraft",
    help="Add tasks to one pretrained network, at about one bit per weight each, without forgetting.",
    epilog="\b\nTry:\n  bitgraft train photos --task flowers --backbone resnet50\n  bitgraft tasks\n  bitgraft demo",
    rich_markup_mode=None,  # plain help pastes well and reads the same through a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(examples: str, name: str | None = None, to: typer.Typer = app) -> Callable[[Any], Any]:
    """Register a function as a command whose help ends with these examples."""
    return to.command(name, epilog="\b\nTry:" + examples)


def flag(name: str, text: str) -> Any:
    """Declare an option without a value; `text` is its help."""
    return typer.Option(name, help=text)


def setting(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def count(text: str, least: int = 1) -> Any:
    return typer.Option(min=least, metavar="N", help=text)


def number(text: str, least: float, most: float | None = None, metavar: str = "X") -> Any:
    return typer.Option(min=least, max=most, metavar=metavar, help=text)


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

"""`bitgraft data`: is there what a suite needs?"""

from pathlib import Path
from typing import Annotated

import typer

from bitgraft.cli.names import AsJson

TRY = """\b
Try:
  bitgraft data check decathlon --root data
  bitgraft data check my-suite.toml --root data --json"""

app = typer.Typer(help="The data sets of a suite.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def data() -> None:
    """The data sets of a suite."""


@app.command(epilog=TRY)
def check(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="One of ours, or a .toml file.")],
    root: Annotated[Path, typer.Option(metavar="DIR", help="Where the data sets lie.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say of each data set whether it is there and as the suite says: images of each split, classes, checksums.

    Ends with exit code 1 where something is missing.
    """
    from bitgraft.bench.check import check_suite
    from bitgraft.bench.suite import load_suite
    from bitgraft.cli.output import show_json

    held = load_suite(suite)
    found = {name: list(faults) for name, faults in check_suite(held, root)}
    if as_json:
        show_json({name: {"ready": not faults, "faults": faults} for name, faults in found.items()})
    else:
        for dataset in held.datasets:
            faults = found[dataset.name]
            typer.echo(f"{dataset.name:16}{'ready' if not faults else faults[0]}")
            for fault in faults[1:]:
                typer.echo(f"{'':16}{fault}")
            if faults and dataset.source:
                typer.echo(f"{'':16}from: {dataset.source}")
    if any(found.values()):
        raise typer.Exit(1)

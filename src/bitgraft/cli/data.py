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

    Of one that is not: what is wrong, where it comes from and which files are read. Exit code 1 where something is
    missing.
    """
    from bitgraft.cli.output import show_json
    from bitgraft.paper.bench.check import check_suite, layout, unchecked
    from bitgraft.paper.bench.reading import load_suite

    held = load_suite(suite)
    found = {name: list(faults) for name, faults in check_suite(held, root)}
    if as_json:
        show_json(
            {
                dataset.name: {
                    "ready": not found[dataset.name],
                    "faults": found[dataset.name],
                    "layout": layout(dataset),
                    "source": dataset.source,
                    "unchecked": unchecked(dataset, root),
                }
                for dataset in held.datasets
            }
        )
    else:
        for dataset in held.datasets:
            faults, gone = found[dataset.name], unchecked(dataset, root)
            ready = f"ready; not here to be checked: {', '.join(gone)}" if gone else "ready"
            typer.echo(f"{dataset.name:16}{faults[0] if faults else ready}")
            more = [f"from: {dataset.source}" if dataset.source else "", f"read as: {layout(dataset)}"]
            for line in [*faults[1:], *filter(None, more)] if faults else ():
                typer.echo(f"{'':16}{line}")
    if any(found.values()):
        raise typer.Exit(1)

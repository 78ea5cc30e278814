"""`bitgraft data`: whether the data sets of a suite are there."""

from pathlib import Path
from typing import Any

import typer

from bitgraft.cli.options import AsJson, Root, Suite
from bitgraft.cli.output import FAILURE, show

TRY = """
  bitgraft data check decathlon --root data
  bitgraft data check my-suite.toml --root data --json"""

app = typer.Typer(help="The data sets of a suite.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def data() -> None:
    """The data sets of a suite."""


@app.command(epilog="\b\nTry:" + TRY)
def check(suite: Suite, root: Root = Path(), as_json: AsJson = False) -> None:
    """Check each data set of a suite: images of each split, classes, checksums.

    For one that is missing or different: what is wrong, where it comes from and which files are read. The exit code is
    then 1.
    """
    from bitgraft.paper.bench.check import check_suite, layout, unchecked
    from bitgraft.paper.bench.reading import load_suite

    held = load_suite(suite)
    found = {name: list(faults) for name, faults in check_suite(held, root)}
    report: dict[str, dict[str, Any]] = {
        dataset.name: {
            "ready": not found[dataset.name],
            "faults": found[dataset.name],
            "layout": layout(dataset),
            "source": dataset.source,
            "unchecked": unchecked(dataset, root),
        }
        for dataset in held.datasets
    }
    lines = []
    for name, said in report.items():
        ready = "ready" + (f"; not here to be checked: {', '.join(said['unchecked'])}" if said["unchecked"] else "")
        about = [f"from: {said['source']}"] if said["source"] else []
        told = [*said["faults"], *about, f"read as: {said['layout']}"] if said["faults"] else [ready]
        lines += [f"{'' if number else name:16}{line}" for number, line in enumerate(told)]
    show(as_json, report, "\n".join(lines))
    if any(found.values()):
        raise typer.Exit(FAILURE)

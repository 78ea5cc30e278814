"""`bitgraft data`: whether the data sets of a suite are there."""

from pathlib import Path

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

    held, report, lines = load_suite(suite), {}, []
    for dataset, (name, found) in zip(held.datasets, check_suite(held, root), strict=True):
        faults, gone, read = list(found), unchecked(dataset, root), layout(dataset)
        about = {"faults": faults, "layout": read, "source": dataset.source, "unchecked": gone}
        report[name] = {"ready": not faults, **about}
        told = ["ready" + (f"; not here to be checked: {', '.join(gone)}" if gone else "")]
        if faults:
            told = [*faults, *([f"from: {dataset.source}"] if dataset.source else []), f"read as: {read}"]
        lines += [f"{'' if number else name:16}{line}" for number, line in enumerate(told)]
    show(as_json, report, "\n".join(lines))
    if not all(one["ready"] for one in report.values()):
        raise typer.Exit(FAILURE)

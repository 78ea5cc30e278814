"""`bitgraft report`: the tables and figures of a benchmark, from the records of its runs."""

from pathlib import Path
from typing import Annotated

import typer

from bitgraft.cli.output import show_json

TRY = """\b
Try:
  bitgraft report runs
  bitgraft report runs --published --out docs/results
  bitgraft report runs --selected --json"""


def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder with record.json files at any depth.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write [RUNS/report].")] = None,
    published: Annotated[bool, typer.Option("--published", help="Put the paper's rows beside these.")] = False,
    selected: Annotated[
        bool, typer.Option("--selected", help="The epoch that was best on validation, not the last.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ROW|FILE", help="Whose errors S is measured against [the challenge's baselines]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write a benchmark's tables and figures.

    Accuracy by data set with the size of all tasks, decathlon scores, cost, and the ablation, in Markdown, LaTeX, CSV
    and HTML. The best method of each data set is bold, the second underlined.
    """
    from bitgraft.report.render import markdown
    from bitgraft.report.write import write_report

    written = write_report(runs, out or runs / "report", published=published, selected=selected, baseline=baseline)
    if as_json:
        show_json({"files": [str(file) for file in written.files], "tables": [t.plain() for t in written.tables]})
    else:
        typer.echo("\n\n".join(map(markdown, written.tables)))
        typer.echo("\nWritten:\n" + "\n".join(f"  {file}" for file in written.files))
    if not written.drawn:
        typer.echo("There are no figures, for want of matplotlib: pip install matplotlib", err=True)

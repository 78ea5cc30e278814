"""`bitgraft report`: the tables and figures of a benchmark, from the records of its runs."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import show

TRY = """
  bitgraft report runs/decathlon --published --output docs/results/decathlon
  bitgraft report docs/results/decathlon/records.jsonl --baseline finetune --output other
  bitgraft report runs/quick-grid --validation --json"""


def report(
    runs: Annotated[Path, Argument(metavar="RUNS", help="A folder of records, at any depth, or a records.jsonl.")],
    out: Annotated[Path | None, Option("--output", "--out", metavar="DIR", help="[RUNS/report]")] = None,
    published: Annotated[bool, Option("--published", help="Add the paper's rows.")] = False,
    selected: Annotated[bool, Option("--selected", help="The best epoch on validation, not the last.")] = False,
    validation: Annotated[bool, Option("--validation", help="Validation accuracies, to choose settings by.")] = False,
    baseline: Annotated[
        str | None, Option(metavar="ROW|FILE", help="The baseline of S [the suite's row, or the challenge's].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a benchmark's tables and figures.

    Accuracy by data set with the size of all tasks, decathlon scores, cost, and the ablation, in Markdown, LaTeX, CSV
    and HTML; figures as PNG; and the records in one file, records.jsonl, which this command reads as well. The best
    method of each data set is bold, the second underlined.
    """
    from bitgraft.paper.report.render import markdown
    from bitgraft.paper.report.write import usual_place, write_report

    if validation and published:
        raise typer.BadParameter("--validation and --published exclude each other: the paper's are test accuracies")
    written = write_report(
        runs,
        out or usual_place(runs),
        published=published,
        selected=selected,
        validation=validation,
        baseline=baseline,
    )
    files = [str(file) for file in written.files]
    data = {"files": files, "tables": [table.plain() for table in written.tables]}
    show(as_json, data, *map(markdown, written.tables), "\n  ".join(["Written:", *files]))
    if not written.drawn:
        typer.echo("no figures were drawn, since matplotlib is not installed: pip install matplotlib", err=True)

"""`bitgraft params`: what tasks cost, from architectures alone."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.options import AsJson, Head
from bitgraft.cli.output import megabytes, show, table

TRY = """
  bitgraft params
  bitgraft params convnext_tiny --tasks 100"""

LEGEND = """\
# params:  all tasks relative to the backbone, counted as in the paper: 32 bits are
           one parameter, without classifiers and running statistics.
task file: one added task on disk, including running statistics and header, without
           the classifier.
all files: the backbone and every task file, relative to the backbone.
PackNet:   all tasks together, ceil(log2 tasks) bits per weight; the paper's 1.10
           and 1.11 come from rounded megabytes. Its files also hold the values that
           they own; the size is their mean."""


def params(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Any backbone; without it, the paper's.")] = None,
    tasks: Annotated[int | None, Option(min=2, help="How many tasks, including the backbone's own [6].")] = None,
    head: Head = None,
    as_json: AsJson = False,
) -> None:
    """Show what tasks cost, method by method.

    The paper's "# Params" rows from its architectures alone, or the same for any backbone.
    """
    if name is None and (tasks is not None or head is not None):
        raise typer.BadParameter("--tasks and --head need the name of a backbone")

    from bitgraft.backbone.loading import read_backbone
    from bitgraft.paper.parameter_counts import account, paper_accounts

    given = {} if head is None else {"head": head}
    counted = [account(read_backbone(name, **given), tasks or 6, name)] if name else paper_accounts()
    show(as_json, [asdict(one) for one in counted], *(part for one in counted for part in _parts(one)), LEGEND)


def _parts(one: Any) -> list[Any]:
    title = f"{one.backbone}, {one.tasks} tasks, {one.parameters / 1e6:.2f} M parameters without the classifier"
    paper = any(row.printed for row in one.rows)
    rows = [
        [r.method, f"{r.relative:.2f}", *[r.printed] * paper, megabytes(r.file_bytes), f"{r.relative_files:.2f}"]
        for r in one.rows
    ]
    return [title, table(["method", "# params>", *["paper>"] * paper, "task file>", "all files>"], rows)]

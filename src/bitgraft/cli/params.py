"""`bitgraft params`: what tasks cost, from architectures alone."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bitgraft.cli.output import megabytes, show, show_json, table

if TYPE_CHECKING:
    from bitgraft.paper.parameter_counts import Account

TRY = """\b
Try:
  bitgraft params
  bitgraft params convnext_tiny --tasks 100"""

LEGEND = """\
# params:  all tasks against the backbone, as the paper counts: 32 bits are one
           parameter, without classifiers and running statistics.
task file: one added task on disk, running statistics and header included,
           classifier apart.
all files: the backbone and every task file against the backbone.
PackNet:   all tasks together, ceil(log2 tasks) bits per weight; the paper's
           1.10 and 1.11 come from rounded megabytes. Its files also hold the
           values that they own; the size is their mean."""


def params(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Any backbone; without it, the paper's.")] = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="How many tasks, the backbone's own included [6].")] = None,
    head: Annotated[
        str | None, typer.Option(metavar="LAYER", help="The layer that a task replaces, where it cannot be read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show what tasks cost, method by method.

    The paper's "# Params" rows from its architectures alone, or the same for any backbone.
    """
    if name is None and (tasks is not None or head is not None):
        raise typer.BadParameter("--tasks and --head go with the name of a backbone; the paper's rows have their own")

    from bitgraft.backbone.loading import read_backbone
    from bitgraft.paper.parameter_counts import account, paper_accounts

    if name is None:
        counted = paper_accounts()
    else:
        counted = [account(read_backbone(name, **({"head": head} if head else {})), tasks or 6, name)]
    if as_json:
        show_json([asdict(one) for one in counted])
    else:
        show(*(part for one in counted for part in (_title(one), _table(one))), LEGEND)


def _title(one: "Account") -> str:
    return f"{one.backbone}, {one.tasks} tasks, {one.parameters / 1e6:.2f} M parameters without the classifier"


def _table(one: "Account") -> object:
    paper = any(row.printed for row in one.rows)
    headings = ["method", "# params>", *["paper>"] * paper, "task file>", "all files>"]
    rows = [
        [
            row.method,
            f"{row.relative:.2f}",
            *[row.printed] * paper,
            megabytes(row.file_bytes),
            f"{row.relative_files:.2f}",
        ]
        for row in one.rows
    ]
    return table(headings, rows)

"""Progress of a suite: a live table in a terminal, else a line for each run."""

import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from bitgraft.methods import registry
from bitgraft.paper.bench.runner import Board, records
from bitgraft.paper.report.records import ORIGINAL


class Progress(Live):
    def __init__(self, folder: Path, *, quiet: bool = False) -> None:
        super().__init__(console=Console(stderr=True, quiet=quiet), auto_refresh=False)
        self.folder, self.quiet = folder, quiet

    def changed(self, board: Board) -> None:
        if self.console.is_terminal:
            self.update(table(board, self.folder), refresh=True)
        elif not self.quiet:
            ended = len(board.done) + len(board.failed)
            print(f"{ended} of {ended + len(board.left)} runs done, {len(board.failed)} failed", file=sys.stderr)


def table(board: Board, folder: Path) -> Table:
    """Test accuracies so far: the mean over seeds, and how many of them are done."""
    suite = board.suite
    drawn = Table(
        "row", title=f"{suite.name}: {len(board.done)} runs done, {len(board.left)} left, {len(board.failed)} failed"
    )
    for dataset in suite.datasets:
        drawn.add_column(dataset.title or dataset.name, justify="right")
    found: dict[tuple[str, str], list[float]] = {}
    for record in records(suite, folder):
        found.setdefault((record["row"], record["dataset"]), []).append(record["last"]["test_accuracy"] or 0.0)
    for row in suite.rows:
        original = ORIGINAL if not registry.get(row.method).joint else ""  # a joint method has another backbone
        shown = [found.get((row.row, d.name)) or found.get((original, d.name), []) for d in suite.datasets]
        drawn.add_row(row.title or row.row, *map(_cell, shown))
    return drawn


def _cell(values: list[float]) -> str:
    if not values:
        return "·"
    mean = f"{100 * sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({len(values)})"

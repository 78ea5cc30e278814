"""How far a suite has come: one table that stays in place, or a line for each run where there is no terminal."""

import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from bitgraft.methods import registry
from bitgraft.paper.bench.runner import Board, records
from bitgraft.paper.report.records import ORIGINAL


class Progress:
    def __init__(self, folder: Path, *, quiet: bool = False) -> None:
        self.folder, self.quiet = folder, quiet
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal and not quiet else None
        self._told = 0

    def __enter__(self) -> "Progress":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def changed(self, board: Board) -> None:
        if self.live is not None:
            self.live.update(table(board, self.folder), refresh=True)
        elif not self.quiet:
            total, ended = len(board.done) + len(board.failed) + len(board.left), len(board.done) + len(board.failed)
            print(f"{ended} of {total} runs done, {len(board.failed)} failed", file=sys.stderr, flush=True)


def table(board: Board, folder: Path) -> Table:
    """Test accuracy so far, the mean over seeds, and how many of a cell's runs are done."""
    suite = board.suite
    drawn = Table(
        title=f"{suite.name}: {len(board.done)} runs done, {len(board.left)} left, {len(board.failed)} failed"
    )
    drawn.add_column("row")
    for dataset in suite.datasets:
        drawn.add_column(dataset.title or dataset.name, justify="right")
    found: dict[tuple[str, str], list[float]] = {}
    for record in records(suite, folder):
        accuracy = record["last"]["test_accuracy"]
        found.setdefault((record["row"], record["dataset"]), []).append(accuracy if accuracy is not None else 0.0)
    for row in suite.rows:
        lends = ORIGINAL if not registry.get(row.method).joint else ""  # whoever trains the backbone has another one
        shown = [found.get((row.row, d.name)) or found.get((lends, d.name), []) for d in suite.datasets]
        drawn.add_row(row.title or row.row, *map(_cell, shown))
    return drawn


def _cell(values: list[float]) -> str:
    if not values:
        return "·"
    mean = f"{100 * sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({len(values)})"

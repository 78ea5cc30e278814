"""Runs what is left of a suite."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bitgraft.backbone.files import write_atomically
from bitgraft.paper.bench.pools import Ended, Place, Pool
from bitgraft.paper.bench.record import finished, record_path
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.report import records as report


@dataclass
class Board:
    """What is done, what has failed, and what is left."""

    suite: Suite
    done: list[Cell] = field(default_factory=list)
    failed: list[Ended] = field(default_factory=list)
    left: list[Cell] = field(default_factory=list)


class Watcher(Protocol):
    def changed(self, board: Board) -> None: ...


def plan(suite: Suite, runs: Path) -> Board:
    board = Board(suite)
    for cell in suite.cells():
        whole = len(finished(suite, runs, cell)) == len(cell.datasets)
        (board.done if whole else board.left).append(cell)
    return board


def run(suite: Suite, place: Place, pool: Pool, watchers: Sequence[Watcher] = ()) -> Board:
    """Make the runs without a record. A run that fails does not hold up the others, unless it trains the backbone."""
    board = plan(suite, place.runs)
    for watcher in watchers:
        watcher.changed(board)
    for cells in ([cell for cell in board.left if suite.leads(cell)], [c for c in board.left if not suite.leads(c)]):
        for ended in pool(suite, cells, place) if cells and not board.failed else ():
            board.left.remove(ended.cell)
            if ended.fault is None:
                board.done.append(ended.cell)
            else:
                board.failed.append(ended)
            for watcher in watchers:
                watcher.changed(board)
    return board


def records(suite: Suite, runs: Path) -> list[dict[str, Any]]:
    """All records of the suite so far."""
    paths = (record_path(runs, cell, name) for cell in suite.cells() for name in cell.datasets)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def describe(suite: Suite, runs: Path) -> None:
    """Write the order and titles of the table's rows and columns for `bitgraft report`."""
    about = report.Suite(
        suite.name,
        suite.title or suite.name,
        suite.form,
        suite.baseline,
        tuple(report.RowTitle(row.row, row.title or row.row) for row in suite.rows),
        tuple(report.DatasetTitle(dataset.name, dataset.title or dataset.name) for dataset in suite.datasets),
    )
    runs.mkdir(parents=True, exist_ok=True)
    write_atomically(runs / report.SUITE, (json.dumps(asdict(about), indent=1) + "\n").encode())

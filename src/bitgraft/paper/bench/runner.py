"""Runs what is left of a suite."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import write_atomically
from bitgraft.paper.bench.pools import Ended, Place, Pool
from bitgraft.paper.bench.record import finished, record_path
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.from_dict import from_dict
from bitgraft.paper.report import records as report


@dataclass
class Board:
    """What is done, what has failed, and what is left."""

    suite: Suite
    done: list[Cell] = field(default_factory=list)
    failed: list[Ended] = field(default_factory=list)
    left: list[Cell] = field(default_factory=list)


def plan(suite: Suite, runs: Path) -> Board:
    board = Board(suite)
    for cell in suite.cells():
        whole = len(finished(suite, runs, cell)) == len(cell.datasets)
        (board.done if whole else board.left).append(cell)
    return board


def run(suite: Suite, place: Place, pool: Pool, changed: Callable[[Board], None] = lambda board: None) -> Board:
    """Make the runs without a record. A run that fails does not hold up the others, unless it trains the backbone."""
    board = plan(suite, place.runs)
    changed(board)
    first, rest = [cell for cell in board.left if suite.leads(cell)], [c for c in board.left if not suite.leads(c)]
    for cells in (first, rest):
        for ended in pool(suite, cells, place) if cells and not board.failed else ():
            board.left.remove(ended.cell)
            if ended.fault is None:
                board.done.append(ended.cell)
            else:
                board.failed.append(ended)
            changed(board)
    return board


def records(suite: Suite, runs: Path) -> list[dict[str, Any]]:
    """All records of the suite so far."""
    paths = (record_path(runs, cell, name) for cell in suite.cells() for name in cell.datasets)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def describe(suite: Suite, runs: Path) -> None:
    """Write the order and titles of the table's rows and columns for `bitgraft report`."""
    about = asdict(from_dict(report.Suite, asdict(suite), ignore_unknown=True))
    runs.mkdir(parents=True, exist_ok=True)
    write_atomically(runs / report.SUITE, (json.dumps(about, indent=1) + "\n").encode())

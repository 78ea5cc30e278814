"""Runs what is left of a suite."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bitgraft.bench.pools import Ended, Place, Pool
from bitgraft.bench.suite import Cell, Suite
from bitgraft.bench.worker import finished, record_path
from bitgraft.files import write_atomically


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
    """Make the runs that have no record yet; a run that fails does not hold up the others."""
    board = plan(suite, place.runs)
    for watcher in watchers:
        watcher.changed(board)
    for ended in pool(suite, list(board.left), place):
        board.left.remove(ended.cell)
        if ended.fault is None:
            board.done.append(ended.cell)
        else:
            board.failed.append(ended)
        for watcher in watchers:
            watcher.changed(board)
    return board


def records(suite: Suite, runs: Path) -> list[dict[str, Any]]:
    """Every record of the suite that there is."""
    paths = (record_path(runs, cell, name) for cell in suite.cells() for name in cell.datasets)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def describe(suite: Suite, runs: Path) -> None:
    """Tell `bitgraft report` in which order the table's rows and columns come."""
    about = {
        "name": suite.name,
        "title": suite.title or suite.name,
        "form": suite.form,
        "rows": [{"row": row.row, "title": row.title or row.row} for row in suite.rows],
        "datasets": [{"name": dataset.name, "title": dataset.title or dataset.name} for dataset in suite.datasets],
    }
    runs.mkdir(parents=True, exist_ok=True)
    write_atomically(runs / "suite.json", (json.dumps(about, indent=1) + "\n").encode())

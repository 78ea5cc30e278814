"""Runs what is left of a suite, each run in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import write_atomically
from bitgraft.paper.bench.record import finished, record_path
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.from_dict import from_dict
from bitgraft.paper.report import records as report

STOPPED = 3
"""The exit code of a worker that was stopped and can be resumed."""


@dataclass(frozen=True)
class Place:
    """Where data are, where records go, and what a run may use."""

    root: Path
    runs: Path
    threads: int = 1
    workers: int = 0


@dataclass
class Board:
    """What is done, what has failed and why, and what is left."""

    suite: Suite
    done: list[Cell] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)
    left: list[Cell] = field(default_factory=list)


def plan(suite: Suite, runs: Path) -> Board:
    board = Board(suite)
    for cell in suite.cells():
        whole = len(finished(suite, runs, cell)) == len(cell.datasets)
        (board.done if whole else board.left).append(cell)
    return board


def work(suite: Suite, cell: Cell, place: Place, stop: threading.Event) -> str | None:
    """Make one run in a process of its own; returns why it failed, or None."""
    threads = str(place.threads)
    folders = {"root": str(place.root.resolve()), "runs": str(place.runs.resolve())}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bitgraft.paper.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,  # Ctrl-C reaches the parent only
        )
        with contextlib.suppress(BrokenPipeError), process:  # leaving closes its input, which tells it to stop
            assert process.stdin is not None
            job = {"suite": asdict(suite), "cell": asdict(cell), **asdict(place), **folders}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            while process.poll() is None and not stop.wait(0.05):
                pass
        errors.seek(0)
        said = errors.read()
    code = process.returncode
    if code == 0:
        return None
    if code == STOPPED:
        return "stopped; the same command goes on with it"
    if code < 0:
        return f"the process was ended by signal {-code}"
    _, marked, fault = said.rpartition("error: ")
    return fault.strip() if marked else said.strip().rpartition("\n")[2] or f"exit code {code}"


def run(
    suite: Suite,
    place: Place,
    jobs: int = 1,
    changed: Callable[[Board], None] = lambda board: None,
    work: Callable[[Suite, Cell, Place, threading.Event], str | None] = work,
) -> Board:
    """Make the runs without a record, `jobs` at a time.

    A run that fails does not hold up the others, unless it trains the backbone. What interrupts this stops all runs in
    a state that can be resumed.
    """
    board, stop, lock = plan(suite, place.runs), threading.Event(), threading.Lock()
    changed(board)

    def make(cell: Cell) -> None:
        fault = "stopped" if stop.is_set() else work(suite, cell, place, stop)
        with lock:
            board.left.remove(cell)
            if fault is None:
                board.done.append(cell)
            else:
                board.failed[cell] = fault
            changed(board)

    leading = [cell for cell in board.left if suite.leads(cell)]
    for cells in (leading, [cell for cell in board.left if cell not in leading]):
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(make, cells if not board.failed else ()))
            except BaseException:
                stop.set()
                raise
    return board


def records(suite: Suite, runs: Path) -> list[dict[str, Any]]:
    """All records of the suite so far."""
    paths = (record_path(runs, cell, name) for cell in suite.cells() for name in cell.datasets)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def adopt(source: Path, runs: Path) -> None:
    """Take over records that a report keeps (records.jsonl), where `runs` has none of its own: they are done."""
    for known in report.read_records(source):
        path = record_path(runs, Cell(known.row, known.seed, (known.dataset,)), known.dataset)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(dict(known.content), indent=1) + "\n").encode())


def describe(suite: Suite, runs: Path) -> None:
    """Write the order and titles of the table's rows and columns for `bitgraft report`."""
    about = asdict(from_dict(report.Suite, asdict(suite), ignore_unknown=True))
    runs.mkdir(parents=True, exist_ok=True)
    write_atomically(runs / report.SUITE, (json.dumps(about, indent=1) + "\n").encode())

"""Run the unfinished runs of a suite, each in its own process."""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bitgraft.backbone.files import check_name
from bitgraft.data.images import few
from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.paper.bench.record import finished, other_settings, record_path, write_json
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.from_dict import from_dict
from bitgraft.paper.report import records as report

STOPPED = 3
"""Exit code of a worker that was stopped and can be resumed."""


@dataclass(frozen=True)
class Place:
    """Folders of the data and of the runs, and the resources of one run."""

    root: Path
    runs: Path
    threads: int = 1
    workers: int = 0


@dataclass
class Board:
    """Progress of a suite: finished runs, failed runs with their errors, and the rest."""

    done: list[Cell] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)
    left: list[Cell] = field(default_factory=list)


def plan(suite: Suite, runs: Path) -> Board:
    board = Board()
    for cell in suite.cells():
        whole = len(finished(suite, runs, cell)) == len(cell.datasets)
        (board.done if whole else board.left).append(cell)
    return board


def run_worker(suite: Suite, cell: Cell, place: Place, stop: threading.Event) -> str | None:
    """Do one run in its own process; return the error if it failed."""
    threads = str(place.threads)
    job = suite, cell, replace(place, root=place.root.resolve(), runs=place.runs.resolve())
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bitgraft.paper.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        with contextlib.suppress(BrokenPipeError), process:  # leaving closes its stdin, which tells it to stop
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(job).hex() + "\n")
            process.stdin.flush()
            while process.poll() is None and not stop.wait(0.05):
                pass
        errors.seek(0)
        stderr = errors.read()
    code = process.returncode
    if code == 0:
        return None
    if code == STOPPED:
        return "stopped; run the same command again to resume"
    if code < 0:
        return f"the process was killed by signal {-code}"
    _, marked, fault = stderr.rpartition("error: ")
    return fault.strip() if marked else stderr.strip().rpartition("\n")[2] or f"exit code {code}"


def run(
    suite: Suite,
    place: Place,
    jobs: int = 1,
    changed: Callable[[Board], None] = lambda board: None,
    work: Callable[[Suite, Cell, Place, threading.Event], str | None] = run_worker,
) -> Board:
    """Do the runs without a record, `jobs` at a time, and call `changed` after each.

    A failed run does not stop the others, unless it trains the backbone. On an exception such as KeyboardInterrupt all
    runs stop in a state that can be resumed.
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

    first = [cell for cell in board.left if suite.trains_backbone(cell)]
    for cells in (first, [cell for cell in board.left if cell not in first]):
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(make, cells if not board.failed else ()))
            except BaseException:
                stop.set()
                raise
    return board


def adopt(source: Path, suite: Suite, runs: Path) -> None:
    """Copy the records of a report (records.jsonl) into `runs`, unless it has its own; those runs count as done.

    Raises:
        SuiteError: records of the suite's runs were made with other settings; nothing is copied.
    """
    wanted = {(cell.row, cell.seed, name) for cell in suite.cells() for name in cell.datasets}
    copies, refused = dict[Path, report.Record](), list[str]()
    for known in report.read_records(source):
        try:
            cell = Cell(check_name(known.row), known.seed, (check_name(known.dataset),))
        except BitgraftError as fault:
            raise SuiteError(f"{known.where}: row and data set are used as folder names, but {fault}") from fault
        path = record_path(runs, cell, known.dataset)
        if path.exists():
            continue
        copies[path] = known
        is_wanted = (known.row, known.seed, known.dataset) in wanted
        if is_wanted and (differing := other_settings(suite, cell, known.dataset, known.content)):
            refused.append(f"{known.where} ({cell}; differing: {', '.join(differing)})")
    if refused:
        raise SuiteError(
            f"some records were made with other settings: {few(refused, 3)}; remove them from {source} to "
            "repeat these runs, or choose other rows and data sets"
        )
    for path, known in copies.items():
        write_json(path, known.content)


def describe(suite: Suite, runs: Path) -> None:
    """Write the order and titles of rows and columns for `bitgraft report`."""
    write_json(runs / report.SUITE, asdict(from_dict(report.Suite, asdict(suite), ignore_unknown=True)))

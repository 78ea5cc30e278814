"""Where runs are made: processes of this machine, or a Ray cluster. Both start the same worker.

Nothing here needs torch, so that a Ray worker is ready at once.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bitgraft.errors import SuiteError

if TYPE_CHECKING:
    from bitgraft.paper.bench.suite import Cell, Suite

STOPPED = 3
"""The exit code of a worker that was stopped and can be resumed."""
RETRIES = 3


@dataclass(frozen=True)
class Place:
    """Where data are, where records go, and what a run may use."""

    root: Path
    runs: Path
    threads: int
    workers: int = 0


@dataclass(frozen=True)
class Ended:
    cell: "Cell"
    fault: str | None = None
    """Why there is no record."""


Pool = Callable[["Suite", Sequence["Cell"], Place], Iterator[Ended]]


def job(suite: "Suite", cell: "Cell", place: Place) -> str:
    folders = {"root": str(place.root.resolve()), "runs": str(place.runs.resolve())}
    return json.dumps({"suite": asdict(suite), **asdict(cell), **asdict(place), **folders})


def work(line: str, started: Callable[[subprocess.Popen[str]], None] = lambda process: None) -> str | None:
    """Make one run in a process of its own; returns why it failed, or None."""
    threads, said = str(json.loads(line)["threads"]), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "bitgraft.paper.bench.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        start_new_session=True,  # Ctrl-C reaches the parent only; the worker stops when its input ends
    )
    assert process.stdin is not None
    assert process.stderr is not None
    with contextlib.suppress(OSError), process:  # OSError: it ended before it was told anything
        started(process)
        process.stdin.write(line + "\n")
        process.stdin.flush()
        said = process.stderr.read()
    code = process.returncode
    if code == 0:
        return None
    if code == STOPPED:
        return "stopped; the same command goes on with it"
    if code < 0:
        return f"the process was ended by signal {-code}"
    _, marked, fault = said.rpartition("error: ")
    return fault.strip() if marked else said.strip().rpartition("\n")[2] or f"exit code {code}"


@dataclass(frozen=True)
class Local:
    """A number of runs at a time on this machine."""

    jobs: int

    def __call__(self, suite: "Suite", cells: Sequence["Cell"], place: Place) -> Iterator[Ended]:
        processes: list[subprocess.Popen[str]] = []
        over = threading.Event()

        def make(cell: "Cell") -> Ended:
            return Ended(cell, "stopped" if over.is_set() else work(job(suite, cell, place), processes.append))

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for future in as_completed([pool.submit(make, cell) for cell in cells]):
                    yield future.result()
            finally:
                over.set()
                for process in processes:
                    if process.poll() is None and process.stdin is not None:
                        process.stdin.close()  # tells it to save its state and stop


class Ray:
    """The same on a Ray cluster whose machines share the folders of data and runs."""

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ImportError as cause:
            raise SuiteError("Ray is not installed: pip install 'bitgraft[ray]', or leave out --ray") from cause
        self.ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False)
            except ConnectionError as cause:
                raise SuiteError(f"no Ray cluster answers at {address}: {cause}") from cause

    def __call__(self, suite: "Suite", cells: Sequence["Cell"], place: Place) -> Iterator[Ended]:
        remote = self.ray.remote(num_cpus=place.threads, max_retries=RETRIES, retry_exceptions=False)(work)
        left = {remote.remote(job(suite, cell, place)): cell for cell in cells}
        while left:
            (ready, *_), _ = self.ray.wait(list(left), num_returns=1)
            cell = left.pop(ready)
            try:
                yield Ended(cell, self.ray.get(ready))
            except self.ray.exceptions.RayError as fault:
                yield Ended(cell, f"the Ray worker was lost {RETRIES + 1} times: {str(fault).splitlines()[0]}")

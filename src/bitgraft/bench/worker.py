"""One run of a suite, in a process of its own: trains what is left of it and leaves a record of each data set.

`python -m bitgraft.bench.worker` takes its job as one line of JSON. When whoever started it goes away, its input ends;
it then stops after the step that it is in, and its state can be resumed.
"""

import datetime
import json
import os
import platform
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitgraft import __version__, joint, store
from bitgraft.bench.suite import SPLITS, Cell, Dataset, Suite, digest, parse, settings
from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.files import write_atomically
from bitgraft.methods import registry
from bitgraft.session import Opened, Outcome, Request, open_request, open_store, train
from bitgraft.training import runs as run_folders
from bitgraft.training.loop import StoppedError
from bitgraft.training.state import of_task

RECORD = "record.json"
FORMAT = 1


def store_folder(runs: Path, cell: Cell) -> Path:
    return runs / cell.row / f"seed-{cell.seed}"


def record_path(runs: Path, cell: Cell, dataset: str) -> Path:
    return store_folder(runs, cell) / "runs" / dataset / RECORD


def finished(suite: Suite, runs: Path, cell: Cell) -> list[str]:
    """The data sets of a run that have their record already."""
    row = suite.row(cell.row)
    return [
        name
        for name in cell.datasets
        if _is_record_of(record_path(runs, cell, name), settings(suite, row, suite.dataset(name), cell.seed))
    ]


def _is_record_of(path: Path, wanted: Mapping[str, Any]) -> bool:
    try:
        held = json.loads(path.read_text())
        same = held["settings"] == digest(wanted)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise SuiteError(f"the record {path} is damaged ({fault}): remove it to have the run made again") from fault
    if not same:
        raise SuiteError(f"the record {path} was made with other settings: give another --runs folder, or remove it")
    return True


class Clock:
    """Time spent on training steps, and the images that went through them in this process."""

    def __init__(self) -> None:
        self.seconds, self.images, self._since = 0.0, 0, time.perf_counter()

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self._since = time.perf_counter()

    def step(self, epoch: int, step: int, images: int) -> None:
        now = time.perf_counter()
        self.seconds, self.images, self._since = self.seconds + now - self._since, self.images + images, now

    def look(self, loss: float, accuracy: float) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        self._since = time.perf_counter()  # validation is not training

    def end(self) -> None:
        pass


def run_cell(
    suite: Suite, cell: Cell, root: Path, runs: Path, *, workers: int = 0, stop: Callable[[], bool] = lambda: False
) -> None:
    """Train what is left of a run and write its records: one data set after the other, or all at once."""
    method = registry.get(suite.row(cell.row).method)
    (_run_jointly if method.joint else _run_in_order)(suite, cell, root, runs, workers, stop)


def _run_in_order(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    done = finished(suite, runs, cell)
    held, net = open_store(store_folder(runs, cell), store.Backbone(**asdict(suite.backbone)))
    for name in cell.datasets:
        if name in done:
            continue
        request = _request(suite, cell, name, root, workers, run_folders.begun(held.run_folder(name)))
        clock, data = Clock(), open_request(request)
        check(suite.dataset(name), data)
        outcome = train(held, net, request, data=data, observers=[clock], stop=stop)
        _write_record(suite, cell, runs, data, outcome, clock)


def _run_jointly(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    folder = store_folder(runs, cell)
    begun = run_folders.begun(joint.run_folder(folder))
    requests = [_request(suite, cell, name, root, workers, begun) for name in cell.datasets]
    opened = [open_request(request) for request in requests]
    for name, data in zip(cell.datasets, opened, strict=True):
        check(suite.dataset(name), data)
    clock, backbone = Clock(), store.Backbone(**asdict(suite.backbone))
    if not begun and folder.exists():  # a store without all of its records: of a run that was killed at its very end
        shutil.rmtree(folder)
    outcomes = joint.train_jointly(folder, backbone, requests, data=opened, observers=[clock], stop=stop)
    for data, outcome in zip(opened, outcomes, strict=True):
        _write_record(suite, cell, runs, data, outcome, clock)


def _request(suite: Suite, cell: Cell, name: str, root: Path, workers: int, begun: bool) -> Request:
    row, dataset = suite.row(cell.row), suite.dataset(name)
    config = suite.config_of(row, dataset, cell.seed)
    going_on = {"resume": begun, "overwrite": not begun}
    return Request(dataset.data, name, row.method, config, row.options, workers, root=root, both=True, **going_on)


def check(dataset: Dataset, data: Opened) -> None:
    """Hold a data set to what the suite says of it."""
    if fault := next(faults(dataset, data), None):
        raise SuiteError(f"data set {dataset.name}: {fault}")


def faults(dataset: Dataset, data: Opened) -> Iterator[str]:
    """What is not as the suite says, a sentence each."""
    for part, wanted in dataset.images.items():
        images = getattr(data.splits, part)
        if (found := len(images) if images else 0) != wanted:
            yield f"{part} has {found:,} images, and must have {wanted:,}"
    if dataset.classes is not None and (found := len(data.splits.classes)) != dataset.classes:
        yield f"there are {found:,} classes, and must be {dataset.classes:,}"


def _write_record(suite: Suite, cell: Cell, runs: Path, data: Opened, outcome: Outcome, clock: Clock) -> None:
    path = record_path(runs, cell, outcome.task.name)
    record = _record(suite, cell, data, outcome, clock)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def _record(suite: Suite, cell: Cell, data: Opened, outcome: Outcome, clock: Clock) -> dict[str, Any]:
    row, dataset, anatomy = suite.row(cell.row), suite.dataset(outcome.task.name), outcome.task.anatomy
    said = settings(suite, row, dataset, cell.seed)
    parts = {part: getattr(data.splits, part) for part in SPLITS}
    head = set(anatomy.head_names())
    backbone = sum(p.numel() for name, p in anatomy.backbone.named_parameters() if name not in head)
    last = outcome.history[-1]
    best = outcome.best or last
    return {
        "format": FORMAT,
        "suite": suite.name,
        "row": row.row,
        "title": row.title or row.row,
        "method": row.method,
        "options": dict(row.options),
        "dataset": dataset.name,
        "seed": cell.seed,
        "backbone": suite.backbone.name,
        "config": said["config"],
        "settings": digest(said),
        "classes": len(data.splits.classes),
        "images": {part: len(images) if images else 0 for part, images in parts.items()},
        "last": _figures(of_task(last, dataset.name), outcome.test),
        "selected": _figures(of_task(best, dataset.name), outcome.best_test),
        "bits": outcome.task.bits(statistics=False),
        "backbone_bits": 32 * backbone,
        "file_bytes": outcome.path.stat().st_size,
        "seconds": round(clock.seconds, 2),
        "train_images_seen": clock.images,
        "peak_memory": _peak_memory(),
        "versions": {
            "bitgraft": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "torchvision", "timm")},
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _figures(record: Mapping[str, Any], tested: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "epoch": record["epoch"],
        "train_accuracy": record.get("train_accuracy"),
        "val_accuracy": record.get("val_accuracy"),
        "test_accuracy": tested["accuracy"] if tested else None,
    }


def _peak_memory() -> int:
    """Bytes that this process had at most, the libraries' own included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wait_for_the_end(gone: threading.Event) -> None:
    sys.stdin.read()
    gone.set()


def main() -> int:
    job = json.loads(sys.stdin.readline())
    gone = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(gone,), daemon=True).start()
    torch.set_num_threads(job["threads"])
    suite, cell = parse(job["suite"]), Cell(job["row"], job["seed"], tuple(job["datasets"]))
    try:
        run_cell(suite, cell, Path(job["root"]), Path(job["runs"]), workers=job["workers"], stop=gone.is_set)
    except StoppedError:
        return 3
    except (BitgraftError, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitgraft import __version__, joint, store
from bitgraft.anatomy import Anatomy
from bitgraft.bench.check import demand
from bitgraft.bench.suite import ORIGINAL, SPLITS, Cell, Dataset, Suite, parse, settings
from bitgraft.data.dataset import ImageDataset
from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.files import write_atomically
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.session import Opened, Outcome, Request, open_request, open_store, preprocessing_for, train
from bitgraft.tracing import logits
from bitgraft.training import runs as run_folders
from bitgraft.training.config import Config
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
        if _is_record_of(
            record_path(runs, cell, name),
            settings(suite, row, suite.dataset(name)),
            asdict(suite.config_of(row, suite.dataset(name), cell.seed)),
        )
    ]


def _is_record_of(path: Path, said: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    try:
        held = json.loads(path.read_text())
        was = {**held["settings"], **asdict(Config()), **held["config"]}  # a setting that came later had its default
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise SuiteError(f"the record {path} is damaged ({fault}): remove it to have the run made again") from fault
    wanted = json.loads(json.dumps({**said, **config}))
    if other := [name for name, value in wanted.items() if was.get(name) != value]:
        raise SuiteError(
            f"the record {path} was made with other settings ({', '.join(other)}): give another --runs folder, or "
            "remove it"
        )
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
    if cell.row == ORIGINAL:
        _try_original(suite, cell, root, runs, workers)
        return
    method = registry.get(suite.row(cell.row).method)
    (_run_jointly if method.joint else _run_in_order)(suite, cell, root, runs, workers, stop)


def _try_original(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int) -> None:
    """How the backbone does on its own data, with no task added: what it does with any number of them."""
    (name,) = cell.datasets
    net = Network(store.Backbone(**asdict(suite.backbone)).build())
    request = _request(suite, cell, name, root, workers, False)
    data = open_request(request)
    demand(suite.dataset(name), data.splits)
    tried = data.tested or (data.splits.val if data.splits.category_ids else data.splits.train)
    assert tried is not None
    images = ImageDataset(tried, preprocessing_for(net, request.config))
    right = count = 0
    with torch.no_grad():
        for batch, labels in torch.utils.data.DataLoader(images, batch_size=128, num_workers=workers):
            right += int((logits(net(batch, task=net.original)).argmax(1) == labels).sum())
            count += len(labels)
    figures = _figures({"epoch": 0}, {"accuracy": right / count})
    costs = {"bits": 0, "backbone_bits": _backbone_bits(net.anatomy), "file_bytes": 0, "seconds": 0.0}
    _write(suite, cell, runs, name, data, {"last": figures, "selected": figures, **costs, "train_images_seen": 0})


def _run_in_order(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    done = finished(suite, runs, cell)
    held, net = open_store(store_folder(runs, cell), store.Backbone(**asdict(suite.backbone)))
    for name in cell.datasets:
        if name in done:
            continue
        request = _request(suite, cell, name, root, workers, run_folders.begun(held.run_folder(name)))
        clock, data = Clock(), open_request(request)
        demand(suite.dataset(name), data.splits)
        outcome = train(held, net, request, data=data, observers=[clock], stop=stop)
        _write_record(suite, cell, runs, data, outcome, clock)


def _run_jointly(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    folder = store_folder(runs, cell)
    begun = run_folders.begun(joint.run_folder(folder))
    requests = [_request(suite, cell, name, root, workers, begun) for name in cell.datasets]
    opened = [open_request(request) for request in requests]
    for name, data in zip(cell.datasets, opened, strict=True):
        demand(suite.dataset(name), data.splits)
    clock, backbone = Clock(), store.Backbone(**asdict(suite.backbone))
    if not begun and folder.exists():  # a store without all of its records: of a run that was killed at its very end
        shutil.rmtree(folder)
    outcomes = joint.train_jointly(folder, backbone, requests, data=opened, observers=[clock], stop=stop)
    for data, outcome in zip(opened, outcomes, strict=True):
        _write_record(suite, cell, runs, data, outcome, clock)


def _request(suite: Suite, cell: Cell, name: str, root: Path, workers: int, begun: bool) -> Request:
    row, dataset = suite.row(cell.row), suite.dataset(name)
    config = suite.config_of(row, dataset, cell.seed)
    return Request(
        dataset.data,
        name,
        row.method,
        config,
        row.options,
        workers,
        resume=begun,
        overwrite=not begun,
        root=root,
        val_share=dataset.val_share,
        both=True,
    )


def _write_record(suite: Suite, cell: Cell, runs: Path, data: Opened, outcome: Outcome, clock: Clock) -> None:
    name, last = outcome.task.name, outcome.history[-1]
    measured = {
        "last": _figures(of_task(last, name), outcome.test),
        "selected": _figures(of_task(outcome.best or last, name), outcome.best_test),
        "bits": outcome.task.bits(statistics=False),
        "backbone_bits": _backbone_bits(outcome.task.anatomy),
        "file_bytes": outcome.path.stat().st_size,
        "seconds": round(clock.seconds, 2),
        "train_images_seen": clock.images,
    }
    _write(suite, cell, runs, name, data, measured)


def _backbone_bits(anatomy: Anatomy) -> int:
    """Its parameters without its head, as the paper counts."""
    head = set(anatomy.head_names())
    return 32 * sum(p.numel() for name, p in anatomy.backbone.named_parameters() if name not in head)


def _write(suite: Suite, cell: Cell, runs: Path, name: str, data: Opened, measured: Mapping[str, Any]) -> None:
    path = record_path(runs, cell, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**_about(suite, cell, suite.dataset(name), data), **measured, **_circumstances()}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def _about(suite: Suite, cell: Cell, dataset: Dataset, data: Opened) -> dict[str, Any]:
    row = suite.row(cell.row)
    parts = {part: getattr(data.splits, part) for part in SPLITS}
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
        "config": asdict(suite.config_of(row, dataset, cell.seed)),
        "settings": settings(suite, row, dataset),
        "classes": len(data.splits.classes),
        "images": {part: len(images) if images else 0 for part, images in parts.items()},
    }


def _circumstances() -> dict[str, Any]:
    return {
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

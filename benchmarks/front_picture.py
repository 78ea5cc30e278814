"""`python -m benchmarks.front_picture demo/store docs/front.png`: draw the README's picture.

Left: mean accuracy over ten domains against bits per weight (`benchmarks.curve`). Right: held-out images with the
predictions of `full`, from the store of `make demo`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.curve import panel
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import load
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.paper import demo
from bitgraft.paper.figures import COLOURS, matplotlib_figure, rendered
from bitgraft.store import Store

CURVE = Path(__file__).parent / "results" / "curve.json"
TITLE = "EfficientNet-Lite0 at 64 px, mean of ten domains"


def answers(axes: Any, store: Store, net: Any, data: str, place: int) -> None:
    splits, name = open_data(demo.DATA[data], seed=demo.CONFIG.seed), f"{data}-full"
    task = net.tasks[name] if name in net.tasks else store.load(net, name)
    images = splits.test
    assert images is not None
    seen = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))
    i = len(images) * 2 * place // demo.SHOWN  # every other image that the demo shows
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
        panel(left.subplots(), json.loads(CURVE.read_text()), TITLE)
        grid = right.subplots(2, 4)
        for row, data in zip(grid, demo.DATA, strict=True):
            for place, axes in enumerate(row):
                answers(axes, store, net, data, place)
    Path(out).write_bytes(rendered(figure, "png"))


if __name__ == "__main__":
    main(*sys.argv[1:])

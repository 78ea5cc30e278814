"""Figures of training and of task files: learning curves, and the paper's analysis of masks and k, layer by layer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bitgraft.errors import FigureError
from bitgraft.format.inspect import Inspection
from bitgraft.paper.drawing import COLOURS, Panel, check_installed, check_path, draw, rendered, repeated, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Panel",
    "check_installed",
    "check_path",
    "draw",
    "draw_curves",
    "draw_k",
    "draw_ones",
    "label",
    "learned_k",
    "learning_curves",
    "parameter_analysis",
    "rendered",
    "save",
]

Records = Sequence[Mapping[str, Any]]
"""One for each epoch, as `fit` returns them in `history` and writes them to metrics.jsonl."""
Quantity = Literal["loss", "accuracy"]

DASHES = ("-", "--", ":", "-.")


def learning_curves(runs: Mapping[str, Records], title: str = "") -> "Figure":
    """Loss and accuracy by epoch, a colour for each run: on validation images, and dotted on training images."""
    return draw([[partial(draw_curves, runs=runs, quantity=what) for what in ("loss", "accuracy")]], title)


def parameter_analysis(found: Sequence[Inspection], backbones: Mapping[str, str] | None = None) -> "Figure":
    """The paper's last figure for any task files, those of each backbone in a column of their own.

    On top the share of ones by layer for all tasks that have masks, below it k1, k2 and k3 for each that learned them.

    Args:
        found: as `bitgraft.format.inspect.inspect_file` gives them.
        backbones: names by fingerprint, for the headings.
    """
    columns: dict[str, list[Inspection]] = {}
    for task in found:
        columns.setdefault(task.archive.backbone, []).append(task)
    named = {one: (backbones or {}).get(one, f"backbone {one[:8]}") for one in columns}
    filled = [_column(tasks, named[one]) for one, tasks in columns.items()]
    filled = [panels for panels in filled if panels]
    if not filled:
        raise FigureError("there is nothing to draw: none of these tasks has masks or k of its own")
    rows = max(map(len, filled))
    return draw([[panels[row] if row < len(panels) else None for panels in filled] for row in range(rows)])


def _column(tasks: Sequence[Inspection], backbone: str) -> list[Panel]:
    masked, scaled = [task for task in tasks if task.weights], [task for task in tasks if learned_k(task)]
    top = max((abs(layer.k[i].mean) for t in scaled for i in learned_k(t) for layer in t.layers), default=0.0)
    panels: list[Panel] = []
    if masked:
        panels.append(partial(draw_ones, tasks=masked, title=f"{backbone}: share of ones"))
    for task in scaled:
        panels.append(partial(draw_k, task=task, title=f"{backbone}: k of {label(task)}", top=top))
    return panels


def draw_curves(axes: "Axes", runs: Mapping[str, Records], quantity: Quantity, title: str = "") -> None:
    """One quantity by epoch; runs without validation have their dotted line alone."""
    factor = 100 if quantity == "accuracy" else 1
    for number, ((name, records), colour) in enumerate(zip(runs.items(), repeated(COLOURS), strict=False)):
        broad = 1.5 + 4 * (1 - number / len(runs)) ** 2  # the first the broadest: lines that coincide are seen
        for part, style, width in (("val", "-", broad), ("train", ":", 1.5)):
            key = f"{part}_{quantity}"
            points = [(record["epoch"], factor * record[key]) for record in records if key in record]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=colour,
                    linewidth=width,
                    marker="o",
                    markersize=3 + width / 2,
                )
        axes.plot([], [], color=colour, label=name)
    axes.set(xlabel="epoch", title=title or quantity, ylabel="%" if quantity == "accuracy" else "cross entropy")
    _whole_numbers(axes)
    axes.plot([], [], ":", color="grey", label="on training images")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, fontsize="small")  # curves may go anywhere


def draw_ones(axes: "Axes", tasks: Sequence[Inspection], title: str = "share of ones") -> None:
    """The share of ones in the mask of each layer, by depth; a colour for each task, a dash for each method."""
    methods = list(dict.fromkeys(task.archive.metadata.method for task in tasks))
    for task, colour in zip(tasks, repeated(COLOURS), strict=False):
        shares = [(i, 100 * layer.density) for i, layer in enumerate(task.layers, 1) if layer.density is not None]
        dash = DASHES[methods.index(task.archive.metadata.method) % len(DASHES)]
        axes.plot(*zip(*shares, strict=True), dash, color=colour, marker="o", markersize=2, label=label(task))
    axes.axhline(50, color="grey", linewidth=0.8, alpha=0.6)
    axes.set(xlabel="layer, from input to output", ylabel="% ones", ylim=(0, 103), title=title)
    _whole_numbers(axes)
    axes.legend(loc="lower left", fontsize="small", ncols=1 + (len(tasks) > 4))


def draw_k(axes: "Axes", task: Inspection, title: str = "", top: float | None = None) -> None:
    """k1, k2 and k3 of each layer, by depth; shaded from lowest to highest where each channel has its own.

    `top` is the largest magnitude that the axis has to show, for panels that are to be compared.
    """
    for i in learned_k(task):
        depths, spreads = range(1, len(task.layers) + 1), [layer.k[i] for layer in task.layers]
        axes.plot(depths, [k.mean for k in spreads], color=COLOURS[i - 1], marker="o", markersize=2, label=f"k{i}")
        if any(k.low != k.high for k in spreads):
            lows, highs = [k.low for k in spreads], [k.high for k in spreads]
            axes.fill_between(depths, lows, highs, color=COLOURS[i - 1], alpha=0.2, linewidth=0)
            top = None  # which speaks of means alone
    axes.axhline(0, color="grey", linewidth=0.8, alpha=0.6)
    axes.set(xlabel="layer, from input to output", ylabel="k", title=title or f"k of {label(task)}")
    if top:
        axes.set_ylim(-1.08 * top, 1.08 * top)
    _whole_numbers(axes)
    axes.legend(ncols=3)


def learned_k(task: Inspection) -> list[int]:
    """Which of k1, k2 and k3 were learned: the file says so, or they differ from layer to layer."""
    if not task.layers or not all(layer.k for layer in task.layers):
        return []
    stated = task.archive.metadata.options
    return [i for i in (1, 2, 3) if stated.get(f"k{i}") == "learn" or len({layer.k[i] for layer in task.layers}) > 1]


def label(task: Inspection) -> str:
    """A task by its name, and its method where the name does not say it."""
    metadata = task.archive.metadata
    return metadata.name if metadata.method in metadata.name else f"{metadata.name}, {metadata.method}"


def _whole_numbers(axes: "Axes") -> None:
    axes.locator_params(axis="x", integer=True)

"""Draw and save figures: learning curves, and the paper's analysis of masks and k by layer.

matplotlib is imported on first use, and its global state (pyplot, the backend) is not touched.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import FigureError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bitgraft.format.inspect import Inspection

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ["#2f7ed8", "#e0702b", "#2ca27b", "#c4519e", "#8f6bd6", "#b08a1e", "#d64550", "#5b8c8c", "#7d8a2e", "#4a4fb0"]
"""Distinguishable for the colour-blind, and visible on white and on black."""
OURS = "full"
"""The method that figures highlight."""
DPI = 150
STYLE = Path(__file__).with_suffix(".mplstyle")
UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}

Panel = Callable[["Axes"], None]
Records = Sequence[Mapping[str, Any]]
"""One record per epoch, as in the `history` that `fit` returns; or more, each with its `step`."""


@contextmanager
def matplotlib_figure() -> Iterator[type["Figure"]]:
    """Yield matplotlib's Figure class, with our style applied inside the block."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise FigureError(f"figures need matplotlib: {how_to_install('figures')}") from cause
    with matplotlib.rc_context(fname=STYLE):
        yield Figure


def draw(panels: Sequence[Sequence[Panel]], title: str = "", size: tuple[float, float] = (4.6, 2.9)) -> "Figure":
    """Draw panels in rows and columns; `size` is that of one panel, in inches."""
    with matplotlib_figure() as figure_class:
        rows, columns = len(panels), max(map(len, panels))
        figure = figure_class(figsize=(size[0] * columns, size[1] * rows), layout="constrained", dpi=DPI)
        for axes, drawn in zip(figure.subplots(rows, columns, squeeze=False), panels, strict=True):
            for panel, place in zip(drawn, axes, strict=False):
                panel(place)
        if title:
            figure.suptitle(title)
        return figure


def check_installed() -> None:
    """Raise FigureError now if matplotlib is missing, not after minutes of work."""
    with matplotlib_figure():
        pass


def check_path(path: str | Path) -> None:
    if Path(path).suffix.lower() not in FORMATS:
        raise FigureError(f"cannot write a figure to {path}: the name must end in {', '.join(FORMATS)}")


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure in the format of the file's suffix; the same figure gives the same bytes."""
    check_path(path)
    write_atomically(Path(path), rendered(figure, Path(path).suffix.lower()[1:]))


def rendered(figure: "Figure", kind: str, *, transparent: bool = False) -> bytes:
    """Render a figure as png, svg or pdf."""
    buffer = io.BytesIO()
    with matplotlib_figure():
        figure.savefig(buffer, format=kind, dpi=DPI, transparent=transparent, metadata=UNDATED[kind])
    return buffer.getvalue()


def as_svg(figure: "Figure", description: str) -> str:
    """Render a figure as inline SVG in the page's text colour."""
    svg = rendered(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # ids must be unique on a page with several figures
    return re.sub(r"<svg [^>]*?(?=viewBox)", f'<svg role="img" aria-label="{escape(description)}" ', svg, count=1)


def draw_curves(
    axes: "Axes", runs: Mapping[str, Records], quantity: Literal["loss", "accuracy"], title: str = ""
) -> None:
    """Plot a quantity by epoch or step: validation solid, training dotted."""
    factor = 100 if quantity == "accuracy" else 1
    unit = "step" if any("step" in record for records in runs.values() for record in records) else "epoch"
    others = cycle([COLOURS[0], *COLOURS[2:]])
    for name, records in runs.items():
        colour = COLOURS[1] if name == OURS else next(others)
        for part, style, width in (("val", "o-", 2.5 if name == OURS else 1.5), ("train", ":", 1)):
            key = f"{part}_{quantity}"
            points = [(record[unit], factor * record[key]) for record in records if key in record]
            axes.plot([x for x, _ in points], [y for _, y in points], style, color=colour, linewidth=width)
        axes.plot([], [], color=colour, label=name)
    axes.plot([], [], ":", color="grey", label="on training images")
    axes.set(xlabel=unit, title=title or quantity, ylabel="%" if quantity == "accuracy" else "cross entropy")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize="small")  # clear of all curves


def parameter_analysis(found: Sequence["Inspection"]) -> "Figure":
    """Draw the paper's last figure: share of ones by layer for tasks with masks, and k for those that learned it."""
    masked = [task for task in found if task.weights]
    panels: list[Panel] = [partial(draw_ones, tasks=masked)] if masked else []
    panels += [partial(draw_k, task=task) for task in found if learned_k(task)]
    if not panels:
        raise FigureError("there is nothing to draw: none of these tasks has masks or learned k")
    return draw([[panel] for panel in panels])


def draw_ones(axes: "Axes", tasks: Sequence["Inspection"], title: str = "share of ones") -> None:
    """Plot the share of ones in each layer's mask, one colour per task."""
    for task, colour in zip(tasks, cycle(COLOURS), strict=False):
        shares = [(i, 100 * layer.density) for i, layer in enumerate(task.layers, 1) if layer.density is not None]
        axes.plot(*zip(*shares, strict=True), color=colour, marker="o", markersize=2, label=label(task))
    axes.axhline(50, color="grey", linewidth=0.8, alpha=0.6)
    axes.set(xlabel="layer, from input to output", ylabel="% ones", ylim=(0, 103), title=title)
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower left", fontsize="small", ncols=1 + (len(tasks) > 4))


def draw_k(axes: "Axes", task: "Inspection", title: str = "") -> None:
    """Plot k1, k2 and k3 of each layer; with one k per channel, shade the range."""
    depths = range(1, len(task.layers) + 1)
    for i in learned_k(task):
        spreads = [layer.k[i] for layer in task.layers]
        axes.plot(depths, [k.mean for k in spreads], color=COLOURS[i - 1], marker="o", markersize=2, label=f"k{i}")
        if any(k.low != k.high for k in spreads):
            lows, highs = [k.low for k in spreads], [k.high for k in spreads]
            axes.fill_between(depths, lows, highs, color=COLOURS[i - 1], alpha=0.2, linewidth=0)
    axes.axhline(0, color="grey", linewidth=0.8, alpha=0.6)
    axes.set(xlabel="layer, from input to output", ylabel="k", title=title or f"k of {label(task)}")
    axes.locator_params(axis="x", integer=True)
    axes.legend(ncols=3)


def learned_k(task: "Inspection") -> list[int]:
    """Return which of k1, k2 and k3 were learned: those the file says, or that differ between layers."""
    if not task.layers or not all(layer.k for layer in task.layers):
        return []
    stated = task.metadata.options
    return [i for i in (1, 2, 3) if stated.get(f"k{i}") == "learn" or len({layer.k[i] for layer in task.layers}) > 1]


def label(task: "Inspection") -> str:
    """Return the task's name, with its method unless the name contains it."""
    metadata = task.metadata
    return metadata.name if metadata.method in metadata.name else f"{metadata.name}, {metadata.method}"

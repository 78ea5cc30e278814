"""The plots people would draw: what a score costs in parameters, and accuracy by method."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bitgraft.paper.drawing import COLOURS, draw
from bitgraft.paper.report.results import Results, Stat, accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNS = "osD^vPX<>*"


@dataclass(frozen=True)
class Point:
    title: str
    params: float
    value: Stat
    paper: bool = False


@dataclass(frozen=True)
class Shown:
    """A row of `by_method`."""

    title: str
    cells: Mapping[str, Stat]
    mean: Stat | None


def against_parameters(points: Sequence[Point], label: str, title: str) -> "Figure":
    """A point for each method: parameters of all tasks across, score or mean accuracy up."""
    figure = draw([[partial(draw_points, points=points, label=label)]], _folded(title), size=(7.5, 5))
    _name_points(figure, figure.axes[0], points)
    return figure


def by_method(shown: Sequence[Shown], label: str, title: str) -> "Figure":
    """A line for each method, a sign for each data set, a bar at the mean."""
    panel = partial(draw_methods, shown=shown, label=label)
    return draw([[panel]], _folded(title), size=(8, 1.6 + 0.38 * len(shown)))


def draw_points(axes: "Axes", points: Sequence[Point], label: str) -> None:
    """Without their names, which need the finished figure to be placed in."""
    for point in points:
        axes.errorbar(
            point.params,
            point.value.mean,
            yerr=point.value.sd,
            fmt="s" if point.paper else "o",
            color=COLOURS[1] if point.paper else COLOURS[0],
            markerfacecolor="white" if point.paper else None,
            capsize=3,
            zorder=3,
        )
    low, high = min(p.params for p in points), max(p.params for p in points)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.08, max(high, low * 1.2) * 1.6)  # room for the names at the right
    _plain_ticks(axes)
    axes.set(xlabel="parameters of all tasks, relative to the backbone", ylabel=label)
    axes.margins(y=0.14)


def draw_methods(axes: "Axes", shown: Sequence[Shown], label: str) -> None:
    datasets = list(dict.fromkeys(name for row in shown for name in row.cells))
    for number, dataset in enumerate(datasets):
        lift = 0.3 * (number / max(len(datasets) - 1, 1) - 0.5)  # equal values stay apart
        here = [(place, row.cells[dataset]) for place, row in enumerate(shown) if dataset in row.cells]
        axes.errorbar(
            [stat.mean for _, stat in here],
            [place + lift for place, _ in here],
            xerr=[stat.sd or 0.0 for _, stat in here],
            fmt=SIGNS[number % len(SIGNS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=5,
            elinewidth=1,
            label=dataset,
        )
    means = [(place, row.mean.mean) for place, row in enumerate(shown) if row.mean is not None]
    if means:
        axes.scatter([m for _, m in means], [p for p, _ in means], marker="|", s=220, color="black", label="mean")
    axes.set_yticks(range(len(shown)), [row.title for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _folded(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 80))


class Box(NamedTuple):
    """What a name or a sign takes of a figure, in pixels."""

    left: float
    right: float
    middle: float
    height: float

    def meets(self, other: "Box") -> bool:
        beside = self.left < other.right and other.left < self.right
        return beside and abs(self.middle - other.middle) < (self.height + other.height) / 2 - 1e-9


def apart(names: Sequence[Box], signs: Sequence[Box]) -> list[float]:
    """Heights near the wanted ones at which no name meets another, or a sign."""
    placed = list(signs)
    for name in names:
        steps = [(other.middle, (name.height + other.height) / 2) for other in placed]
        edges = [middle + way * step for middle, step in steps for way in (1, -1)]
        wanted = sorted([name.middle, *edges], key=lambda edge: abs(edge - name.middle))
        boxes = (name._replace(middle=height) for height in wanted)
        free = (box for box in boxes if not any(box.meets(other) for other in placed))
        placed.append(next(free))  # above the highest edge there is always room
    return [box.middle for box in placed[len(signs) :]]


def accuracies(results: Results) -> list[Shown]:
    """What `by_method` shows; rows without any result left out."""
    made = []
    for row, title in results.rows.items():
        found = {name: results.cell(row, key, accuracy) for key, name in results.datasets.items()}
        cells = {name: cell for name, cell in found.items() if cell is not None}
        if cells:
            made.append(Shown(title, cells, results.whole(row, accuracy, statistics.fmean)))
    return made


def _plain_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_xlim()
    apart_by = (high / low) ** 0.05  # nearer ones would run into each other
    ticks: list[float] = []
    for tick in (1, 1.1, 1.2, 1.5, 2, 3, 4, 6, 10, 20, 50, 100):
        if low <= tick <= high and (not ticks or tick >= ticks[-1] * apart_by):
            ticks.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _name_points(figure: "Figure", axes: "Axes", points: Sequence[Point]) -> None:
    """Names at the right of their points, moved up or down until they can be read."""
    figure.draw_without_rendering()  # places the axes, so that pixels are known
    dot, away = figure.dpi / 72, 14.0  # a point of type in pixels; from a sign to its name, in points
    pixels = [(float(x), float(y)) for x, y in axes.transData.transform([(p.params, p.value.mean) for p in points])]
    names = [
        Box(x + away * dot, x + (away + 5.2 * len(point.title)) * dot, y, 11 * dot)
        for point, (x, y) in zip(points, pixels, strict=True)
    ]
    signs = [Box(x - 4 * dot, x + 4 * dot, y, 8 * dot) for x, y in pixels]
    for point, (_, y), height in zip(points, pixels, apart(names, signs), strict=True):
        axes.annotate(
            point.title,
            (point.params, point.value.mean),
            xytext=(away, (height - y) / dot),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=COLOURS[1] if point.paper else "black",
            arrowprops={
                "arrowstyle": "-",
                "color": "#999999",
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )

"""Figures of a report: score against parameters, and accuracy by method."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bitgraft.paper.figures import COLOURS, draw
from bitgraft.paper.report.results import Results, Stat, accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX<>*"
TICKS = (1, 1.1, 1.2, 1.5, 2, 3, 4, 6, 10, 20, 50, 100)
GAP = 14.0  # from a marker to its label, in points


@dataclass(frozen=True)
class Point:
    title: str
    params: float
    value: Stat
    paper: bool = False


def by_method(results: Results) -> "Figure":
    """One line per method, one marker per data set, a bar at the mean; rows without any result are left out."""
    shown = [row for row in results.rows if any(results.accuracies(row, name) for name in results.datasets)]
    panel = partial(_draw_methods, results=results, shown=shown)
    return draw([[panel]], textwrap.fill(results.name, 80), size=(8, 1.6 + 0.38 * len(shown)))


def _draw_methods(axes: "Axes", results: Results, shown: Sequence[str]) -> None:
    columns = {name: [results.cell(row, name, accuracy) for row in shown] for name in results.datasets}
    tried = [name for name, cells in columns.items() if any(cells)]
    for number, name in enumerate(tried):
        lift = 0.3 * (number / max(len(tried) - 1, 1) - 0.5)  # so that equal values do not overlap
        points = [(y, cell) for y, cell in enumerate(columns[name]) if cell]
        axes.errorbar(
            [cell.mean for _, cell in points],
            [y + lift for y, _ in points],
            xerr=[cell.sd or 0.0 for _, cell in points],
            fmt=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=5,
            elinewidth=1,
            label=results.datasets[name],
        )
    means = [(place, results.whole(row, accuracy, statistics.fmean)) for place, row in enumerate(shown)]
    if drawn := [(mean.mean, place) for place, mean in means if mean]:
        x, y = zip(*drawn, strict=True)
        axes.scatter(x, y, marker="|", s=220, color="black", label="mean")
    axes.set_yticks(range(len(shown)), [results.rows[row] for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(f"{'validation' if results.validation else 'test'} accuracy, %")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def against_parameters(points: Sequence[Point], label: str, title: str) -> "Figure":
    """One point per method: parameters of all tasks across, score or mean accuracy up."""
    figure = draw([[partial(_draw_points, points=points, label=label)]], textwrap.fill(title, 80), size=(7.5, 5))
    figure.draw_without_rendering()  # places the axes, so that pixels are known
    _label_points(figure.axes[0], points, figure.dpi / 72)
    return figure


def _draw_points(axes: "Axes", points: Sequence[Point], label: str) -> None:
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
    axes.set(xlabel="parameters of all tasks, relative to the backbone", ylabel=label, xscale="log")
    axes.set_xlim(low / 1.08, max(high, low * 1.2) * 1.6)  # room for the labels at the right
    axes.margins(y=0.14)
    low, high = axes.get_xlim()
    ticks: list[float] = []
    for tick in TICKS:
        if low <= tick <= high and (not ticks or tick >= ticks[-1] * (high / low) ** 0.05):  # as many as fit
            ticks.append(tick)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _label_points(axes: "Axes", points: Sequence[Point], dot: float) -> None:
    """Put labels right of their points, higher up where they would meet another label or a marker.

    Args:
        dot: one point of type in pixels.
    """
    pixels = [(float(x), float(y)) for x, y in axes.transData.transform([(p.params, p.value.mean) for p in points])]
    taken = [(x - 4 * dot, x + 4 * dot, y) for x, y in pixels]
    line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
    for point, (x, y) in sorted(zip(points, pixels, strict=True), key=lambda pair: pair[1][1]):
        left, right, height = x + GAP * dot, x + (GAP + 5.2 * len(point.title)) * dot, y
        while any(left < end and start < right and abs(height - middle) < 11 * dot for start, end, middle in taken):
            height += 1
        taken.append((left, right, height))
        axes.annotate(
            point.title,
            (point.params, point.value.mean),
            xytext=(GAP, (height - y) / dot),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=COLOURS[1] if point.paper else "black",
            arrowprops=line,
        )

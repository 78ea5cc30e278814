"""Figures of a report: accuracy by method, and score or mean accuracy against parameters."""

import textwrap
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from bitgraft.paper.figures import COLOURS, draw
from bitgraft.paper.report.results import AnyRow, Results, Row, Stat, published_table
from bitgraft.paper.report.tables import scored
from bitgraft.paper.scores import Baselines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX<>*"
ACCENT, PLAIN, PAPER = COLOURS[1], COLOURS[0], "#8a8f98"
TICKS = (1, 1.2, 1.5, 2, 3, 4, 6, 10, 20, 50, 100)
GAP = 14.0  # from a marker to its label, in points
OWN = {"imagenet", "imagenet12"}  # the backbone's own data, which add no parameters; a suite may omit them


class Point(NamedTuple):
    title: str
    params: float
    value: Stat
    paper: bool = False
    ours: bool = False

    @property
    def colour(self) -> str:
        return ACCENT if self.ours else PAPER if self.paper else PLAIN


def by_method(results: Results) -> "Figure | None":
    """Plot one line per method, with a marker per data set and a bar at the mean; omit rows without results."""
    rows = [row for row in results.rows.values() if any(row.values.values())]
    panel, size = partial(_draw_methods, results=results, rows=rows), (8, 1.6 + 0.38 * len(rows))
    return draw([[panel]], textwrap.fill(results.name, 80), size=size) if rows else None


def _draw_methods(axes: "Axes", results: Results, rows: Sequence[Row]) -> None:
    tried = results.tried
    for number, name in enumerate(tried):
        offset = 0.3 * (number / max(len(tried) - 1, 1) - 0.5)  # so that equal values do not overlap
        points = [(y + offset, cell) for y, row in enumerate(rows) if (cell := row.cell(name))]
        axes.errorbar(
            [cell.mean for _, cell in points],
            [y for y, _ in points],
            xerr=[cell.sd or 0.0 for _, cell in points],
            fmt=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=5,
            elinewidth=1,
            label=results.datasets[name],
        )
    means = [(y, row.total(results.datasets, fmean)) for y, row in enumerate(rows)]
    if drawn := [(mean.mean, y) for y, mean in means if mean]:
        x, y = zip(*drawn, strict=True)
        axes.scatter(x, y, marker="|", s=220, color="black", label="mean")
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    for place, row in enumerate(rows):
        if row.ours:
            axes.axhspan(place - 0.5, place + 0.5, color=ACCENT, alpha=0.12, linewidth=0)
            axes.get_yticklabels()[place].set(fontweight="bold", color=ACCENT)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{'validation' if results.validation else 'test'} accuracy, %")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def points(results: Results, published: bool, baselines: Baselines | None) -> list[Point]:
    """Return a point per row that has all data sets, plus the paper's rows if their data sets are the same."""
    form, combine = ("scores", sum) if baselines else (results.form, fmean)
    rows: list[AnyRow] = [*(scored(results, baselines) if baselines else results).rows.values()]
    paper = published_table(form, results.backbone, results.datasets) if published else None
    if paper and set(paper.datasets) - set(results.datasets) <= OWN:
        rows += paper.rows
    found = []
    for row in rows:
        value, params = row.total(results.datasets, combine), row.parameters(results.datasets)
        if value is not None and params is not None:
            theirs = not isinstance(row, Row)
            found.append(Point(f"{row.title} (paper)" if theirs else row.title, float(params), value, theirs, row.ours))
    return found


def against_parameters(points: Sequence[Point], label: str, title: str) -> "Figure":
    """Plot score or mean accuracy against the parameters of all tasks, one point per method."""
    figure = draw([[partial(_draw_points, points=points, label=label)]], textwrap.fill(title, 80), size=(7.5, 5))
    figure.draw_without_rendering()  # lays out the axes, so that pixel positions are known
    _label_points(figure.axes[0], points, figure.dpi / 72)
    return figure


def _draw_points(axes: "Axes", points: Sequence[Point], label: str) -> None:
    for point in points:
        axes.errorbar(
            point.params,
            point.value.mean,
            yerr=point.value.sd,
            fmt="s" if point.paper else "o",
            color=point.colour,
            markersize=9 if point.ours else 6,
            markerfacecolor="white" if point.paper else None,
            capsize=3,
            zorder=3,
        )
    axes.set(xlabel="parameters of all tasks, relative to the backbone", ylabel=label, xscale="log")
    low, high = min(p.params for p in points), max(p.params for p in points)
    low, high = low / 1.08, max(high, low * 1.2) * 1.6  # room for the labels at the right
    axes.set_xlim(low, high)
    axes.margins(y=0.14)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _label_points(axes: "Axes", points: Sequence[Point], dot: float) -> None:
    """Label points on their right, moved up to avoid other labels and markers; `dot` is one typographic point in px."""
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
            color=point.colour if point.ours or point.paper else "black",
            fontweight="bold" if point.ours else "normal",
            arrowprops=line,
        )

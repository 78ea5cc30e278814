"""From a folder of records to a folder of tables and figures."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from bitgraft.files import write_atomically
from bitgraft.report import figures
from bitgraft.report.published import published_table
from bitgraft.report.records import read_records, read_suites
from bitgraft.report.render import comma_separated, html_page, latex_page, markdown_page
from bitgraft.report.results import Measure, Results, Stat, accuracy, gather
from bitgraft.report.table import Table
from bitgraft.report.tables import baselines_of, score_measure, tables
from bitgraft.report.wording import name_of

OWN = ("imagenet", "imagenet12")
"""What the backbone does of itself: it adds no parameters, and a suite may leave it out."""


@dataclass(frozen=True)
class Report:
    tables: tuple[Table, ...]
    files: tuple[Path, ...]
    drawn: bool
    """Whether there are figures: without matplotlib there are none."""


def write_report(
    runs: Path, out: Path, *, published: bool = False, selected: bool = False, baseline: str | None = None
) -> Report:
    """Read every record below `runs`; write report.md, report.tex, report.html, a CSV for each table, and figures."""
    grids = gather(read_records(runs), read_suites(runs), selected)
    can_draw = find_spec("matplotlib") is not None
    made: list[Table] = []
    drawn: list[tuple[Path, str, bytes]] = []
    for grid in grids:
        stem = _stem(grid, grids)
        own = [replace(table, name=f"{stem}-{table.name}") for table in tables(grid, published, baseline)]
        made += own
        if can_draw:
            found = _figures(grid, published, baseline)
            drawn += [(out / f"{stem}-{name}.png", caption, png) for name, caption, png in found]
    title = ", ".join(dict.fromkeys(grid.suite.title or grid.suite.name for grid in grids))
    shown = [(file, caption) for file, caption, _ in drawn]
    texts = {
        out / "report.md": markdown_page(title, made, shown),
        out / "report.tex": latex_page(made),
        out / "report.html": html_page(title, made, shown),
        **{out / f"{table.name}.csv": comma_separated(table) for table in made},
    }
    out.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_atomically(file, text.encode())
    for file, _, png in drawn:
        write_atomically(file, png)
    return Report(tuple(made), (*texts, *(file for file, _ in shown)), can_draw)


def _stem(grid: Results, grids: list[Results]) -> str:
    """What the files of a suite begin with; with the backbone where one suite ran on several."""
    several = sum(other.suite.name == grid.suite.name for other in grids) > 1
    return re.sub(r"[^\w.-]+", "-", f"{grid.suite.name}-{grid.backbone}" if several else grid.suite.name)


def _figures(grid: Results, published: bool, baseline: str | None) -> Iterator[tuple[str, str, bytes]]:
    """Name, caption and PNG of each figure that there is something to show in."""
    name = name_of(grid)
    if shown := figures.accuracies(grid):
        caption = f"{name}: accuracy by method"
        yield "by-method", caption, figures.by_method(shown, "test accuracy, %", caption)
    if grid.form == "ablation":
        return
    points = _points(grid, published, baseline)
    if points:
        label = "decathlon score S" if grid.form == "decathlon" else "mean accuracy, %"
        caption = f"{name}: {label.removesuffix(', %')} against parameters"
        yield "params", caption, figures.against_parameters(points, label, caption)


def _points(grid: Results, published: bool, baseline: str | None) -> list[figures.Point]:
    """A point for each row that has all data sets; the paper's, where they are on the same data sets."""
    measure: Measure = accuracy
    combine: Callable[[Iterable[float]], float] = fmean
    form = "accuracy"
    if grid.form == "decathlon":
        measure, combine, form = score_measure(baselines_of(grid, baseline)), sum, "scores"
    points = [
        figures.Point(title, params, value)
        for row, title in grid.rows.items()
        if (value := grid.whole(row, measure, combine)) is not None and (params := grid.params(row)) is not None
    ]
    paper = published_table(form, grid.backbone, grid.datasets) if published else None
    if paper is not None and set(paper.datasets) - set(grid.datasets) <= set(OWN):
        points += [
            figures.Point(f"{row.title} (paper)", float(row.params), Stat(theirs, None, 1), paper=True)
            for row in paper.rows
            if row.params is not None and (theirs := row.over(grid.datasets, combine)) is not None
        ]
    return points

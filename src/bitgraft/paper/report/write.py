"""From records to a folder of tables and figures."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bitgraft.backbone.files import write_atomically
from bitgraft.paper.drawing import rendered
from bitgraft.paper.report import figures
from bitgraft.paper.report.published import published_table
from bitgraft.paper.report.records import LINES, as_lines, holds_record_files, read_records, read_suites
from bitgraft.paper.report.render import comma_separated, html_page, latex_page, markdown_page
from bitgraft.paper.report.results import Measure, Results, Stat, accuracy, gather
from bitgraft.paper.report.table import Table
from bitgraft.paper.report.tables import baselines_of, score_measure, tables
from bitgraft.paper.report.wording import circumstances, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN = ("imagenet", "imagenet12")
"""What the backbone does of itself: it adds no parameters, and a suite may leave it out."""


@dataclass(frozen=True)
class Report:
    tables: tuple[Table, ...]
    files: tuple[Path, ...]
    drawn: bool
    """Whether there are figures: without matplotlib there are none."""


def usual_place(source: Path) -> Path:
    """Where a report of these records goes: below the runs, or where they lie in one file."""
    if source.is_file():
        return source.parent
    return source / "report" if holds_record_files(source) else source


def write_report(
    source: Path,
    out: Path,
    *,
    published: bool = False,
    selected: bool = False,
    validation: bool = False,
    baseline: str | None = None,
) -> Report:
    """Write report.md, report.tex, report.html, a CSV for each table, figures, and the records in one file."""
    records, suites = read_records(source), read_suites(source)
    grids = gather(records, suites, selected, validation)
    can_draw = find_spec("matplotlib") is not None
    made: list[Table] = []
    drawn: list[tuple[Path, str, bytes]] = []
    for grid in grids:
        stem = _stem(grid, grids)
        made += [replace(table, name=f"{stem}-{table.name}") for table in tables(grid, published, baseline)]
        if can_draw:
            found = _figures(grid, published, baseline)
            drawn += [(out / f"{stem}-{name}.png", caption, rendered(plot, "png")) for name, caption, plot in found]
    title = ", ".join(dict.fromkeys(grid.suite.title or grid.suite.name for grid in grids))
    shown = [(file, caption) for file, caption, _ in drawn]
    where = circumstances(records)
    origin = f"From {len(records)} records, {LINES}" + (f" ({where})." if where else ".")
    texts = {
        out / "report.md": markdown_page(title, made, shown, origin),
        out / "report.tex": latex_page(made),
        out / "report.html": html_page(title, made, shown, origin),
        **{out / f"{table.name}.csv": comma_separated(table) for table in made},
        out / LINES: as_lines(records, suites),
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


def _figures(grid: Results, published: bool, baseline: str | None) -> Iterator[tuple[str, str, "Figure"]]:
    """Name, caption and plot of each figure that there is something to show in."""
    name, images = name_of(grid), "validation" if grid.validation else "test"
    if shown := figures.accuracies(grid):
        yield "by-method", f"{name}: accuracy by method", figures.by_method(shown, f"{images} accuracy, %", name)
    if grid.form == "ablation":
        return
    label, points = _points(grid, published, baseline)
    if points:
        caption = f"{name}: {label.removesuffix(', %')} against parameters"
        yield "params", caption, figures.against_parameters(points, label, name)


def _points(grid: Results, published: bool, baseline: str | None) -> tuple[str, list[figures.Point]]:
    """What is shown, and a point for each row that has all data sets; the paper's, where they are on the same ones."""
    label, form = "mean accuracy, %", str(grid.form)
    measure: Measure = accuracy
    combine: Callable[[Iterable[float]], float] = fmean
    if grid.form == "decathlon" and (baselines := baselines_of(grid, baseline)) is not None:
        label, form, measure, combine = "decathlon score S", "scores", score_measure(baselines), sum
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
    return label, points

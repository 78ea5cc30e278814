"""Write a report: a folder of tables and figures from records."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import DataError
from bitgraft.paper.figures import as_svg, rendered
from bitgraft.paper.report import figures
from bitgraft.paper.report.records import LINES, as_lines, holds_record_files, read_records, read_suites
from bitgraft.paper.report.render import Table, from_template, latex_page, markdown_page
from bitgraft.paper.report.results import Results, gather
from bitgraft.paper.report.tables import baselines_of, circumstances, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    tables: tuple[Table, ...]
    files: tuple[Path, ...]
    drawn: bool
    """Whether figures were drawn; not without matplotlib."""


def usual_place(source: Path) -> Path:
    """Return the default folder of a report: inside the run folder, or next to a records.jsonl."""
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
    """Write report.md, report.tex, report.html, the figures, and records.jsonl."""
    records, suites = read_records(source), read_suites(source)
    grids = gather(records, suites, selected, validation)
    if baseline is not None and all(grid.form != "decathlon" for grid in grids):
        raise DataError(f"--baseline {baseline}: {grids[0].suite.name} has no score S that a baseline would change")
    can_draw = find_spec("matplotlib") is not None
    made: list[Table] = []
    captions: dict[str, str] = {}
    drawings: list[tuple[str, str]] = []
    files: dict[str, bytes] = {}
    for grid in grids:
        several = sum(other.suite.name == grid.suite.name for other in grids) > 1
        stem = re.sub(r"[^\w.-]+", "-", f"{grid.suite.name}-{grid.backbone}" if several else grid.suite.name)
        made += [replace(table, name=f"{stem}-{table.name}") for table in tables(grid, published, baseline)]
        for name, caption, plot in _figures(grid, published, baseline) if can_draw else ():
            captions[f"{stem}-{name}.png"], files[f"{stem}-{name}.png"] = caption, rendered(plot, "png")
            drawings.append((as_svg(plot, caption), caption))
    title = ", ".join(dict.fromkeys(grid.suite.title or grid.suite.name for grid in grids))
    where = circumstances(records)
    origin = f"From {len(records)} records, {LINES}" + (f" ({where})." if where else ".")
    texts = {
        "report.md": markdown_page(title, made, captions, origin),
        "report.tex": latex_page(made),
        "report.html": from_template("report.html", title=title, tables=made, drawings=drawings, origin=origin),
        LINES: as_lines(records, suites),
    }
    files = {name: text.encode() for name, text in texts.items()} | files
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return Report(tuple(made), tuple(out / name for name in files), can_draw)


def _figures(grid: Results, published: bool, baseline: str | None) -> Iterator[tuple[str, str, "Figure"]]:
    """Yield name, caption and plot of each figure that has data."""
    if plot := figures.by_method(grid):
        yield "by-method", f"{grid.name}: accuracy by method", plot
    if grid.form != "ablation":
        baselines = baselines_of(grid, baseline) if grid.form == "decathlon" else None
        what, unit = ("mean accuracy", ", %") if baselines is None else ("decathlon score S", "")
        if points := figures.points(grid, published, baselines):
            plot = figures.against_parameters(points, what + unit, grid.name)
            yield "params", f"{grid.name}: {what} against parameters", plot

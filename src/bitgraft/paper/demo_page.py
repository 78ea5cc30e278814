"""The demo's results as one HTML page with nothing beside it: style, figures and pictures are inside."""

import base64
import io
import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import Inspection
from bitgraft.paper.figures import learning_curves, parameter_analysis, rendered
from bitgraft.paper.report.render import Cell, Line, Table, from_template
from bitgraft.training.progress import spelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMBNAIL = 128  # pixels


@dataclass(frozen=True)
class Row:
    """One trained task."""

    data: str
    method: str
    accuracy: float
    kilobytes: float
    bits_per_weight: float
    images_per_second: float
    """In training."""
    history: list[dict[str, Any]]
    inspection: Inspection


@dataclass(frozen=True)
class Answer:
    """A task's prediction for a held-out image."""

    image: Image.Image
    said: str
    sure: float
    truth: str

    @property
    def tiny(self) -> bool:
        return self.image.width < THUMBNAIL // 2

    @property
    def picture(self) -> str:
        """A thumbnail as a data URL."""
        small, buffer = self.image.copy(), io.BytesIO()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Shown:
    """A data set, and a reloaded task's predictions for some of its images."""

    about: str
    images: tuple[int, int, int]
    """Training, validation and held-out."""
    majority: float
    """The share of the most frequent class in the held-out images."""
    task: str
    answers: list[Answer]
    same: bool
    """Whether the reloaded task gives the same scores as the trained one, bit for bit."""


@dataclass(frozen=True)
class Findings:
    backbone: str
    megabytes: float
    budget: str
    rows: list[Row]
    shown: dict[str, Shown]
    probes: int
    """How many images the ImageNet scores were compared on."""
    same: bool
    seconds: float


def write(found: Findings, path: Path) -> None:
    curves, analyses = [], []
    for data in found.shown:
        rows = [row for row in found.rows if row.data == data]
        runs = {row.method: row.history for row in rows}
        curves.append(as_svg(learning_curves(runs, data), f"loss and accuracy by epoch on {data}"))
        tasks = [row.inspection for row in rows]
        names = {task.backbone: data for task in tasks}
        analyses.append(as_svg(parameter_analysis(tasks, names), f"share of ones and k by layer, {data}"))
    about = {"time": spelled(found.seconds), "cores": os.cpu_count(), "torch": torch.__version__}
    table = results_table(found)
    page = from_template("demo.html", found=found, table=table, curves=curves, analyses=analyses, **about)
    write_atomically(path, page.encode())


def results_table(found: Findings) -> Table:
    best = {data: max(row.accuracy for row in found.rows if row.data == data) for data in found.shown}
    lines = []
    for row in found.rows:
        cells = (
            Cell(row.method),
            Cell(f"{100 * row.accuracy:.1f} %", mark="best" if row.accuracy == best[row.data] else None),
            Cell(f"{row.kilobytes:,.0f} kB"),
            Cell(f"{found.megabytes:.1f} MB"),
            Cell(f"{row.bits_per_weight:.2f}"),
            Cell(f"{row.images_per_second:.0f}"),
        )
        lines.append(Line(row.data, cells))
    headings = ("method", "accuracy", "task file", "copy of the network", "bits per weight", "images/s in training")
    notes = tuple(
        f"{data}: {shown.about}, {shown.images[0]:,} images to train on and {shown.images[2]:,} held out, of which the "
        f"most frequent class is {100 * shown.majority:.0f} %"
        for data, shown in found.shown.items()
    )
    return Table("results", "Accuracy on held-out images", "data", headings, tuple(lines), notes)


def as_svg(figure: "Figure", description: str) -> str:
    """A figure as SVG in the colour of the page's text."""
    svg = rendered(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # several figures on one page would repeat them
    return re.sub(r"<svg [^>]*?(?=viewBox)", f'<svg role="img" aria-label="{escape(description)}" ', svg, count=1)

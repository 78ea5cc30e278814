"""Write the demo's results as one self-contained HTML page, with styles, figures and images inside."""

import base64
import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import Inspection
from bitgraft.paper.figures import Records, as_svg, draw, draw_curves, draw_k, draw_ones, learned_k
from bitgraft.paper.report.render import Cell, Line, Table, from_template
from bitgraft.training.progress import format_duration

THUMBNAIL = 128  # pixels
SIZES = "bits per weight: without head and description; separate copy: a whole network with this task's head"


@dataclass(frozen=True)
class Row:
    """One trained task."""

    data: str
    method: str
    accuracy: float
    kilobytes: float
    bits_per_weight: float
    copy_megabytes: float
    """Size of a whole network with this task's head."""
    curve: Records
    inspection: Inspection


@dataclass(frozen=True)
class Answer:
    """A task's prediction for a held-out image."""

    image: Image.Image
    predicted: str
    confidence: float
    truth: str
    count: str = ""
    """How often the true class is mistaken for the predicted one."""

    @property
    def picture(self) -> str:
        """The thumbnail as a data URL."""
        small, buffer = self.image.copy(), io.BytesIO()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Shown:
    """A data set, and the predictions of a reloaded task for some of its images."""

    about: str
    images: tuple[int, int, int]  # training, validation and held-out
    majority: float  # share of the most frequent class in the held-out images
    task: str
    answers: list[Answer]
    worst: list[Answer]
    """One example of each of the most frequent confusions."""
    same: bool
    """Whether the reloaded task's scores are bit-identical to the trained one's."""


@dataclass(frozen=True)
class Findings:
    backbone: str
    budget: str
    rows: list[Row]
    shown: dict[str, Shown]
    probes: int  # images on which ImageNet scores were compared
    same: bool
    seconds: float


def write(found: Findings, path: Path) -> None:
    curves, analyses = list[str](), list[str]()
    for data in found.shown:
        rows = [row for row in found.rows if row.data == data]
        runs = {row.method: row.curve for row in rows}
        for what in ("loss", "accuracy"):
            panel = partial(draw_curves, runs=runs, quantity=what, title=f"{data}: {what}")
            curves.append(as_svg(draw([[panel]]), f"{what} by training step on {data}"))
        masked = [row.inspection for row in rows if row.inspection.weights]
        ones = partial(draw_ones, tasks=masked, title=f"{data}: share of ones")
        analyses.append(as_svg(draw([[ones]]), f"share of ones by layer, {data}"))
        for task in filter(learned_k, masked):
            analyses.append(as_svg(draw([[partial(draw_k, task=task)]]), f"k by layer, {data}"))
    best = max((row for row in found.rows if row.method == "full"), key=lambda row: row.accuracy)
    about = {"time": format_duration(found.seconds), "cores": os.cpu_count(), "torch": torch.__version__, "best": best}
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
            Cell(f"{row.copy_megabytes:.1f} MB"),
            Cell(f"{row.bits_per_weight:.2f}"),
        )
        lines.append(Line(row.data, cells, row.method == "full"))
    headings = ("method", "accuracy", "task file", "separate copy", "bits per weight")
    about = (
        f"{data}: {shown.about}; {shown.images[0]:,} training and {shown.images[2]:,} held-out images; the most "
        f"frequent class is {100 * shown.majority:.0f} % of the held-out ones"
        for data, shown in found.shown.items()
    )
    return Table("results", "Accuracy on held-out images", "data", headings, tuple(lines), (SIZES, *about))

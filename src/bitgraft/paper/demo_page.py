"""The demo's results as one HTML page with nothing beside it: style, figures and pictures are inside."""

import base64
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import Inspection
from bitgraft.paper.figures import Panel, draw, draw_curves, draw_k, draw_ones, label, learned_k, rendered
from bitgraft.paper.report.render import Cell, Line, Table, document, html
from bitgraft.training.progress import spelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """\
:root { color-scheme: light dark; --line: #8884; --soft: #767676; --good: #1a7f4b; --bad: #c0392b; --band: #8881; }
@media (prefers-color-scheme: dark) { :root { --soft: #a0a0a0; --good: #4cc38a; --bad: #ff7b6b; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { line-height: 1.2; margin: 1.5rem 0 .5rem; } h2 { margin: 2.5rem 0 .5rem; } h3 { margin: 1.5rem 0 .25rem; }
p { max-width: 44rem; } .soft, .notes, figcaption { color: var(--soft); font-size: .9rem; }
code { background: var(--band); padding: .1em .3em; border-radius: .25em; overflow-wrap: anywhere; }
.table { overflow-x: auto; } caption { text-align: left; font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.row { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.pictures { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); }
figure { margin: 0; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font-family: inherit !important; }
.pictures img { width: 100%; border-radius: .4rem; display: block; } .tiny { image-rendering: pixelated; }
.right { color: var(--good); } .wrong { color: var(--bad); }
.claim { border-left: .25rem solid var(--good); padding: .25rem 1rem; background: var(--band); }
.claim.broken { border-color: var(--bad); }"""
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
    write_atomically(path, document("One network, two new tasks", CSS, _parts(found)).encode())


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


def _parts(found: Findings) -> Iterator[str]:
    yield (
        f"<p>{escape(found.backbone)} with its ImageNet weights was given two new tasks, each by three methods on the "
        f"same budget: {escape(found.budget)}. The network itself is never written to; a task is a small file beside "
        "it.</p>"
    )
    yield html(results_table(found))
    if found.same:
        yield (
            '<p class="claim"><strong>Nothing was forgotten.</strong> All 1,000 ImageNet scores of the network, for '
            f"each of {found.probes} images, are bit-identical before the first task and after the last.</p>"
        )
    else:
        yield (
            '<p class="claim broken"><strong>The network\'s ImageNet scores CHANGED.</strong> That must not happen: '
            "please report it.</p>"
        )
    yield "<h2>What the tasks say</h2>"
    for shown in found.shown.values():
        same = "the same scores to the last bit" if shown.same else "OTHER scores, which must not happen"
        yield f"<h3>{escape(shown.task)}</h3>"
        yield f'<p class="soft">Read back from its file into a fresh network, which gives {same}.</p>'
        yield f'<div class="pictures">{"".join(map(picture, shown.answers))}</div>'
    yield "<h2>Learning curves</h2>"
    yield '<p class="soft">Solid lines: validation images; dotted: training images, with their random crops.</p>'
    for data in found.shown:
        yield _curves(data, {row.method: row.history for row in found.rows if row.data == data})
    yield "<h2>Masks and k, layer by layer</h2>"
    yield (
        "<p>A mask M picks weights, and W~ = k0 W + k1 + k2 M + k3 W∘M. The paper found masks of about half ones for "
        "its full method and denser ones for Piggyback, k1 and k2 of opposite sign, and stronger changes with depth. "
        "That was after long training; a short run moves less.</p>"
    )
    for data in found.shown:
        yield _analysis(data, [row.inspection for row in found.rows if row.data == data and row.inspection.weights])
    yield "<h2>How this page was made</h2>"
    yield (
        f'<p class="soft"><code>bitgraft demo</code>, in {spelled(found.seconds)} on {os.cpu_count()} cores with torch '
        f"{escape(torch.__version__)}. It trains as <code>bitgraft train</code> does; the tasks are in the folder "
        "<code>store</code> beside this page: <code>bitgraft tasks</code>, <code>predict</code> and "
        "<code>inspect</code> go on from there.</p>"
    )


def picture(answer: Answer) -> str:
    """A thumbnail with the prediction below it."""
    small, buffer = answer.image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(buffer, "PNG")
    css = ' class="tiny"' if small.width < THUMBNAIL // 2 else ""
    image = f'<img{css} alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    right = answer.said == answer.truth
    sign, css, truth = ("✓", "right", "") if right else ("✗", "wrong", f"<br>is {escape(answer.truth)}")
    said = f'<strong class="{css}">{sign} {escape(answer.said)}</strong> {100 * answer.sure:.0f}&nbsp;%{truth}'
    return f"<figure>{image}<figcaption>{said}</figcaption></figure>"


def _curves(data: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    loss = partial(draw_curves, runs=runs, quantity="loss", title=f"{data}: loss")
    accuracy = partial(draw_curves, runs=runs, quantity="accuracy", title=f"{data}: accuracy")
    return _side_by_side([(loss, f"loss by epoch on {data}"), (accuracy, f"accuracy by epoch on {data}")])


def _analysis(data: str, masked: list[Inspection]) -> str:
    ones = partial(draw_ones, tasks=masked, title=f"{data}: share of ones")
    ks = [(partial(draw_k, task=task), f"k by layer of {label(task)}") for task in masked if learned_k(task)]
    return _side_by_side([(ones, f"share of ones by layer, {data}"), *ks])


def _side_by_side(panels: Sequence[tuple[Panel, str]]) -> str:
    """One figure per panel, so that a phone shows one below the other."""
    return f'<div class="row">{"".join(drawing(draw([[panel]]), about) for panel, about in panels)}</div>'


def drawing(figure: "Figure", description: str) -> str:
    """A figure as SVG in the colour of the page's text."""
    svg = rendered(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # several figures on one page would repeat them
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?(?=viewBox)", f'<svg role="img" aria-label="{escape(description)}" ', svg, count=1)
    return f"<figure>{svg}</figure>"

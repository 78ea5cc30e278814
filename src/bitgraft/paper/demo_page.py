"""What the demo found, as a page."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import Inspection
from bitgraft.paper.figures import Panel, draw, draw_curves, draw_k, draw_ones, label, learned_k
from bitgraft.paper.page import document, drawing, element, picture, table, text
from bitgraft.training.progress import spelled


@dataclass(frozen=True)
class Row:
    """One task: what was trained, and what came of it."""

    data: str
    method: str
    accuracy: float
    kilobytes: float
    bits_per_weight: float
    images_per_second: float
    """While it was trained."""
    history: list[dict[str, Any]]
    inspection: Inspection


@dataclass(frozen=True)
class Answer:
    """What a task says of a held-out image."""

    image: Image.Image
    said: str
    sure: float
    truth: str


@dataclass(frozen=True)
class Shown:
    """A data set, and what a reloaded task says of some of its images."""

    about: str
    images: tuple[int, int, int]
    """To train on, to validate and held out."""
    commonest: float
    """The share of the commonest class in the held-out images."""
    task: str
    answers: list[Answer]
    same: bool
    """Whether the reloaded task gives the scores of the trained one, bit for bit."""


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


def write(findings: Findings, path: Path) -> None:
    write_atomically(path, document("One network, two new tasks", _parts(findings)).encode())


def commonest(labels: Sequence[int]) -> float:
    """How often one is right who always says the commonest class."""
    return max(Counter(labels).values()) / len(labels)


def _parts(found: Findings) -> Iterator[str]:
    yield element(
        "p",
        f"{text(found.backbone)} with its ImageNet weights was given two new tasks, each by three methods on the same "
        f"budget: {text(found.budget)}. The network itself is never written to; a task is a small file beside it.",
    )
    yield _table(found)
    yield _claim(found)
    yield "<h2>What the tasks say</h2>"
    for shown in found.shown.values():
        yield from _answers(shown)
    yield "<h2>Learning curves</h2>"
    yield "<p class='soft'>Unbroken on validation images, dotted on training images as they come, crops and all.</p>"
    for data in found.shown:
        yield _curves(data, found.rows)
    yield "<h2>Masks and k, layer by layer</h2>"
    yield (
        "<p>A mask M picks weights, and W~ = k0 W + k1 + k2 M + k3 W∘M. The paper found masks of about half ones for "
        "its full method and denser ones for Piggyback, k1 and k2 of opposite sign, and stronger changes with depth. "
        "That was after long training; a short run moves less.</p>"
    )
    for data in found.shown:
        yield _analysis(data, found.rows)
    yield "<h2>How this page was made</h2>"
    yield element(
        "p",
        f"<code>bitgraft demo</code>, in {spelled(found.seconds)} on {os.cpu_count()} cores with torch "
        f"{text(torch.__version__)}. It trains as <code>bitgraft train</code> does; the tasks are in the folder "
        "<code>store</code> beside this page: <code>bitgraft tasks</code>, <code>predict</code> and "
        "<code>inspect</code> go on from there.",
        "soft",
    )


def _table(found: Findings) -> str:
    heads = (
        "data",
        "method",
        "accuracy",
        "task file",
        "copy of the network",
        "bits per weight",
        "images/s in training",
    )
    rows = [
        (
            row.data,
            row.method,
            f"{100 * row.accuracy:.1f} %",
            f"{row.kilobytes:,.0f} kB",
            f"{found.megabytes:.1f} MB",
            f"{row.bits_per_weight:.2f}",
            f"{row.images_per_second:.0f}",
        )
        for row in found.rows
    ]
    tops = {data: max(row.accuracy for row in found.rows if row.data == data) for data in found.shown}
    best = [i for i, row in enumerate(found.rows) if row.accuracy == tops[row.data]]
    about = "; ".join(
        f"{data}: {shown.about}, {shown.images[0]:,} images to train on and {shown.images[2]:,} held out, of which the "
        f"commonest class is {100 * shown.commonest:.0f} %"
        for data, shown in found.shown.items()
    )
    return table(f"Accuracy on held-out images. {about}.", heads, rows, left=2, best=best)


def _claim(found: Findings) -> str:
    held = (
        f"<strong>Nothing was forgotten.</strong> All 1,000 ImageNet scores of the network, for each of {found.probes} "
        "images, are bit-identical before the first task and after the last."
    )
    broken = "<strong>The network's ImageNet scores CHANGED.</strong> That must not happen: please report it."
    return element("p", held if found.same else broken, "claim" if found.same else "claim broken")


def _answers(shown: Shown) -> Iterator[str]:
    same = "the same scores to the last bit" if shown.same else "OTHER scores, which must not happen"
    yield element("h3", text(shown.task))
    yield element("p", f"Read back from its file into a fresh network, which gives {same}.", "soft")
    yield element("div", "".join(_answer(answer) for answer in shown.answers), "pictures")


def _answer(answer: Answer) -> str:
    right = answer.said == answer.truth
    verdict = element("strong", f"{'✓' if right else '✗'} {text(answer.said)}", "right" if right else "wrong")
    truth = "" if right else f"<br>is {text(answer.truth)}"
    return picture(answer.image, f"{verdict} {100 * answer.sure:.0f}&nbsp;%{truth}")


def _curves(data: str, rows: Sequence[Row]) -> str:
    runs = {row.method: row.history for row in rows if row.data == data}
    loss = partial(draw_curves, runs=runs, quantity="loss", title=f"{data}: loss")
    accuracy = partial(draw_curves, runs=runs, quantity="accuracy", title=f"{data}: accuracy")
    return _side_by_side([(loss, f"loss by epoch on {data}"), (accuracy, f"accuracy by epoch on {data}")])


def _analysis(data: str, rows: Sequence[Row]) -> str:
    masked = [row.inspection for row in rows if row.data == data and row.inspection.weights]
    title = f"{data}: share of ones"
    panels: list[tuple[Panel, str]] = [
        (partial(draw_ones, tasks=masked, title=title), f"share of ones by layer, {data}")
    ]
    for task in masked:
        if learned_k(task):
            panels.append((partial(draw_k, task=task), f"k by layer of {label(task)}"))
    return _side_by_side(panels)


def _side_by_side(panels: Sequence[tuple[Panel, str]]) -> str:
    """Each panel a figure of its own, so that a phone shows one below the other."""
    return element("div", "".join(drawing(draw([[panel]]), about) for panel, about in panels), "row")

"""How every figure looks, and how it becomes a file.

matplotlib is loaded when something is drawn, and its state for the process (pyplot, the backend) is left alone.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import FigureError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
COLOURS = (
    "#2f7ed8",
    "#e0702b",
    "#2ca27b",
    "#c4519e",
    "#8f6bd6",
    "#b08a1e",
    "#d64550",
    "#5b8c8c",
    "#7d8a2e",
    "#4a4fb0",
)
"""Told apart by the colour-blind too, and of a lightness that shows on white and on black."""
SIZE = 4.6, 2.9  # inches of one panel
DPI = 150
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bitgraft",  # the same figure gives the same bytes
    "pdf.fonttype": 42,
}

Panel = Callable[["Axes"], None]


def draw(panels: Sequence[Sequence[Panel | None]], title: str = "", size: tuple[float, float] = SIZE) -> "Figure":
    """A figure with a panel for each of these, in rows and columns; None leaves a place empty."""
    with matplotlib_figure() as figure_class:
        rows, columns = len(panels), max(map(len, panels))
        figure = figure_class(figsize=(size[0] * columns, size[1] * rows), layout="constrained", dpi=DPI)
        axes = figure.subplots(rows, columns, squeeze=False)
        for row, drawn in enumerate(panels):
            for column, panel in enumerate(drawn):
                if panel is None:
                    axes[row][column].set_axis_off()
                else:
                    panel(axes[row][column])
        if title:
            figure.suptitle(title)
        return figure


def check_installed() -> None:
    """Refuse at once what would fail once there is something to draw."""
    with matplotlib_figure():
        pass


def check_path(path: str | Path) -> None:
    """Refuse a file that no figure can be written to, before anything is read or drawn."""
    if Path(path).suffix.lower() not in FORMATS:
        raise FigureError(f"a figure is written as {', '.join(FORMATS)}: {path} ends in none of them")


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure as its file's ending says; the same figure gives the same bytes."""
    check_path(path)
    write_atomically(Path(path), rendered(figure, Path(path).suffix.lower()[1:]))


def rendered(figure: "Figure", kind: str, *, transparent: bool = False) -> bytes:
    """A figure as png, svg or pdf."""
    nameless = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib_figure():
        figure.savefig(buffer, format=kind, dpi=DPI, transparent=transparent, metadata=nameless[kind])
    return buffer.getvalue()


def repeated(colours: Sequence[str]) -> Iterator[str]:
    while True:
        yield from colours


@contextmanager
def matplotlib_figure() -> Iterator[type["Figure"]]:
    """matplotlib's Figure, under our style for as long as this lasts."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise FigureError("figures need matplotlib, which is not installed: pip install 'bitgraft[figures]'") from cause
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield Figure

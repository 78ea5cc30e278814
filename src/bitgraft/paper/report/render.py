"""Tables, and how they are rendered in Markdown, LaTeX and HTML."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import Environment, PackageLoader

Mark = Literal["best", "second"]
DASH = "–"
MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\|*_<>`[]"})
LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    | {"±": r"$\pm$", "×": r"$\times$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "✓": r"\ding{51}"}
)


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    sd: float | None = None
    n: int | None = None
    spread: str = ""
    """Follows the number: standard deviation, and the number of seeds if it varies within the table."""
    mark: Mark | None = None

    def plain(self) -> dict[str, Any]:
        text = self.text + self.spread
        return {"text": text, "value": self.value, "sd": self.sd, "n": self.n, "mark": self.mark}


@dataclass(frozen=True)
class Line:
    title: str
    cells: tuple[Cell, ...]
    ours: bool = False
    """Highlighted: a row of the method `full`."""


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    corner: str
    """Heading of the first column."""
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        rows = [{"title": line.title, "cells": [cell.plain() for cell in line.cells]} for line in self.lines]
        about = {"name": self.name, "caption": self.caption, "headings": self.headings}
        return {**about, "rows": rows, "notes": self.notes}


def markdown(table: Table) -> str:
    """Render a table with padded columns, so that the source is readable too."""
    heads, *rows = _texts(table, MARKDOWN, "**%s**", "<u>%s</u>")
    widths = [max(3, *map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines = [f"**{_md(table.caption)}**", ""]
    for row in (heads, rule, *rows):
        padded = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join([*lines, *([""] if table.notes else []), *(f"- {_md(note)}" for note in table.notes)])


def latex(table: Table) -> str:
    """Render a table; check marks need the package pifont."""
    heads, *rows = (" & ".join(row) + r" \\" for row in _texts(table, LATEX, r"\textbf{%s}", r"\underline{%s}"))
    caption = ". ".join([table.caption, *(note.rstrip(".") for note in table.notes)]) + "."
    begin = rf"""\begin{{table}}[t]
\centering
\caption{{{caption.translate(LATEX)}}}
\label{{tab:{table.name}}}
\begin{{tabular}}{{l{"r" * len(table.headings)}}}"""
    return "\n".join([begin, r"\hline", heads, r"\hline", *rows, r"\hline", "\\end{tabular}\n\\end{table}"])


def _texts(table: Table, escapes: dict[int, str], best: str, second: str) -> list[list[str]]:
    """Return the escaped headings and rows; `best` and `second` are %-formats for marked cells."""

    def text(cell: Cell) -> str:
        mark = best if cell.mark == "best" else second if cell.mark == "second" else "%s"
        return mark % cell.text.translate(escapes) + cell.spread.translate(escapes)

    heads = [name.translate(escapes) for name in (table.corner, *table.headings)]
    return [heads, *([line.title.translate(escapes), *map(text, line.cells)] for line in table.lines)]


def markdown_page(title: str, tables: Iterable[Table], figures: Mapping[str, str], origin: str) -> str:
    shown = [f"![{_md(caption)}]({file})" for file, caption in figures.items()]
    return "\n\n".join([f"# {_md(title)}", *map(markdown, tables), *shown, _md(origin)]) + "\n"


def latex_page(tables: Iterable[Table]) -> str:
    return "% \\usepackage{pifont} for \\ding; \\input this file\n" + "\n\n".join(map(latex, tables)) + "\n"


def from_template(name: str, **values: Any) -> str:
    """Render an HTML page from `paper/templates`; values are escaped."""
    loader = PackageLoader("bitgraft.paper", "templates")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    return templates.get_template(name).render(values)


def _md(text: str) -> str:
    return text.translate(MARKDOWN)

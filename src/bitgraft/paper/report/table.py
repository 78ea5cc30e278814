"""A table before it is set in any format: cells, marks, notes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bitgraft.paper.report.results import Stat

DASH = "–"
Mark = Literal["best", "second"]


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    sd: float | None = None
    n: int | None = None
    spread: str = ""
    """What is set after the number: its spread, and how many seeds where that differs within the table."""
    mark: Mark | None = None


@dataclass(frozen=True)
class Line:
    title: str
    cells: tuple[Cell, ...]
    ranked: bool = False


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    corner: str
    """The heading of the first column."""
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "caption": self.caption,
            "headings": list(self.headings),
            "rows": [
                {
                    "title": line.title,
                    "cells": [
                        {"text": c.text + c.spread, "value": c.value, "sd": c.sd, "n": c.n, "mark": c.mark}
                        for c in line.cells
                    ],
                }
                for line in self.lines
            ],
            "notes": list(self.notes),
        }


def number(stat: Stat | None, decimals: int, show_n: bool = False) -> Cell:
    """A mean with its spread; a dash where there is nothing."""
    if stat is None:
        return Cell(DASH)
    spread = "" if stat.sd is None else f" ± {stat.sd:.{decimals}f}" + (f" ({stat.n})" if show_n else "")
    return Cell(f"{stat.mean:.{decimals}f}", stat.mean, stat.sd, stat.n, spread)


def figure(value: float | None, decimals: int) -> Cell:
    return Cell(DASH) if value is None else Cell(f"{value:.{decimals}f}", value)


def marks(shown: Sequence[float | None]) -> list[Mark | None]:
    """The best and the second, as printed. Equal ones share a place, and after two that are best there is no second.

    Nothing is marked where nobody scored anything.
    """
    order = sorted((value for value in shown if value is not None), reverse=True)
    if len(order) < 2 or order[0] <= 0:
        return [None] * len(shown)
    second = order[1] if order[1] < order[0] else None
    return [None if v is None else "best" if v == order[0] else "second" if v == second else None for v in shown]


def ranked(table: Table, columns: Sequence[int]) -> Table:
    """The table with marks in these columns, among the lines that compete."""
    made = [list(line.cells) for line in table.lines]
    for column in columns:
        shown = [
            float(line.cells[column].text) if line.ranked and line.cells[column].value is not None else None
            for line in table.lines
        ]
        for cells, mark in zip(made, marks(shown), strict=True):
            cells[column] = replace(cells[column], mark=mark)
    lines = tuple(replace(line, cells=tuple(cells)) for line, cells in zip(table.lines, made, strict=True))
    return replace(table, lines=lines)


def transposed(table: Table, corner: str) -> Table:
    """Lines become columns."""
    columns = zip(*(line.cells for line in table.lines), strict=True)
    lines = tuple(Line(title, tuple(cells)) for title, cells in zip(table.headings, columns, strict=True))
    return replace(table, corner=corner, headings=tuple(line.title for line in table.lines), lines=lines)

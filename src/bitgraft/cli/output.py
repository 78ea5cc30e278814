"""What commands print: tables for people, plain and uncut where nobody looks, and JSON for machines."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

WIDE = 1000  # columns where the output is no terminal, so that names are never cut or folded
USAGE, FAILURE, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 1


def show_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def show(*parts: Any) -> None:
    """Print text, and tables made by `table`, with an empty line between them."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else WIDE, force_terminal=terminal, highlight=False)
    rendered = []
    for part in parts:
        with console.capture() as captured:
            console.print(part, markup=False)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        rendered.append("\n".join(line for line in lines if line))
    print("\n\n".join(rendered))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """A table; a column whose heading ends in ">" is set to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        number = column.endswith(">")
        made.add_column(column.removesuffix(">"), justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"

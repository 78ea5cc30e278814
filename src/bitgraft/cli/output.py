"""What commands print: tables for people, plain and uncut through a pipe, and JSON for machines."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

USAGE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def show_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def console(stream: TextIO, *, quiet: bool = False) -> "Console":
    """Through a pipe it is so wide that no name is ever cut or folded."""
    from rich.console import Console

    terminal = stream.isatty()
    return Console(file=stream, width=None if terminal else 1000, force_terminal=terminal, highlight=False, quiet=quiet)


def show(*parts: Any) -> None:
    """Print text and tables with an empty line between them."""
    to, rendered = console(sys.stdout), []
    for part in parts:
        with to.capture() as captured:
            to.print(part, markup=False)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        rendered.append("\n".join(line for line in lines if line))
    print("\n\n".join(rendered))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> "Table":
    """A column whose heading ends in ">" is aligned to the right; whole numbers get their commas."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        justify = "right" if column.endswith(">") else "left"
        made.add_column(column.removesuffix(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(Text("" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell) for cell in row))
    return made


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"

"""What commands print: tables for people, plain and uncut through a pipe, and JSON for machines."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

USAGE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def console(stream: TextIO, **options: Any) -> Any:
    """Through a pipe it is so wide that no name is ever cut or folded."""
    from rich.console import Console

    terminal = stream.isatty()
    width = None if terminal else 1000
    return Console(file=stream, width=width, force_terminal=terminal, highlight=False, **options)


def show(as_json: bool, data: Any, *parts: Any) -> None:
    """Print the data as JSON, or the parts (text and tables) with an empty line between them."""
    if as_json:
        print(json.dumps(data, indent=2, allow_nan=False))
        return
    if parts:
        print("\n\n".join(part if isinstance(part, str) else _rendered(part) for part in parts))


def _rendered(table: Any) -> str:
    to = console(sys.stdout)
    with to.capture() as captured:
        to.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
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

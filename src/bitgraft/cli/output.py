"""What commands print: tables for people, which a pipe never cuts, and JSON for programs."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import typer

USAGE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def console(stream: TextIO, **options: Any) -> Any:
    """Return a rich console; through a pipe it is wide enough that no name is cut or folded."""
    from rich.console import Console

    terminal = stream.isatty()
    width = None if terminal else 1000
    return Console(file=stream, width=width, force_terminal=terminal, highlight=False, **options)


def show(as_json: bool, data: Any, *parts: Any) -> None:
    """Print the data as JSON, or the parts (text and tables) separated by empty lines."""
    if as_json:
        print(json.dumps(data, indent=2, allow_nan=False))
    elif parts:
        print("\n\n".join(part if isinstance(part, str) else _rendered(part) for part in parts))


def show_images(
    as_json: bool, data: list[dict[str, Any]], errors: Mapping[str, str], columns: list[str], rows: list[Any]
) -> None:
    """Print the results of the images, then one error per image without a result; exit with 1 if there are any."""
    data = data + [{"image": path, "error": reason} for path, reason in errors.items()]
    show(as_json, data, *[table(columns, rows)] * bool(rows))
    for reason in errors.values():
        print(f"error: {reason}", file=sys.stderr)
    if errors:
        raise typer.Exit(FAILURE)


def _rendered(table: Any) -> str:
    to = console(sys.stdout)
    with to.capture() as captured:
        to.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """Return a rich table; a heading that ends in ">" aligns its column to the right, and integers get commas."""
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

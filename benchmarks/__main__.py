"""`python -m benchmarks`: every row, or those named; a table, a JSON file, and exit code 1 where one falls short."""

import argparse
import datetime
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import serving, storage, training
from benchmarks.measure import THREADS, Row

GROUPS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "step-wrn": lambda folder, rounds: training.steps("wrn4", 1.02, rounds),
    "step-resnet": lambda folder, rounds: training.steps("resnet50", 1.08, 2 * rounds),  # one of its rows is close
    "convolutions": lambda folder, rounds: training.convolutions(rounds),
    "memory": lambda folder, rounds: training.memory(),
    "switch": lambda folder, rounds: serving.switch(folder, 10 * rounds),  # some milliseconds each
    "residents": lambda folder, rounds: serving.residents(folder, 2 * rounds),
    "forward": lambda folder, rounds: serving.forward(folder, 6 * rounds),
    "mixed": serving.mixed,
    "files": lambda folder, rounds: storage.files(folder, 6 * rounds),
    "cold": lambda folder, rounds: storage.cold_process(folder, max(3, rounds // 3)),
}
GROWTH: dict[str, Callable[[Path, int], Any]] = {
    "growth": lambda folder, rounds: training.growth(max(3, rounds // 3)),
    "entropy": lambda folder, rounds: storage.entropy(folder),
}


def main() -> int:
    known = [*GROUPS, *GROWTH]
    parser = argparse.ArgumentParser(prog="make bench", epilog="make bench ROWS=switch,files   make bench ROUNDS=5")
    parser.add_argument("--rows", default=",".join(known), help=f"some of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=15, help="how often each side takes its turn, at least")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"))
    given = parser.parse_args()
    chosen = [name for name in given.rows.split(",") if name]
    if stray := [name for name in chosen if name not in known]:
        parser.error(f"there are no rows {stray[0]!r}; known are {', '.join(known)}")
    if not given.json.parent.is_dir():
        parser.error(f"there is no folder {str(given.json.parent)!r} to write {given.json.name} to: make it first")
    torch.set_num_threads(THREADS)
    rows, tables = _measure(chosen, given.rounds)
    _write(given.json, rows, tables)
    _show(rows, tables)
    return 1 if any(row.reached is False for row in rows) else 0


def _measure(chosen: list[str], rounds: int) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
    rows: list[Row] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    progress = Console(stderr=True)
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            if name in GROWTH:
                tables[name] = GROWTH[name](Path(folder), rounds)
                continue
            for row in GROUPS[name](Path(folder), rounds):
                progress.print(f"{row.what}: {row.median:.3f} times {row.against}", highlight=False)
                rows.append(row)
    return rows, tables


def _write(path: Path, rows: list[Row], tables: dict[str, list[dict[str, Any]]]) -> None:
    """What was measured now goes in place of what was measured of it before."""
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "tables": {}}
    fresh = {row.key: row.plain() for row in rows}
    kept = {row["key"]: row for row in before["rows"]}
    about = {"date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__}
    merged = {**about, "rows": [*(kept | fresh).values()], "tables": before["tables"] | tables}
    path.write_text(json.dumps(merged, indent=1) + "\n")


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {THREADS} cores"


def _show(rows: list[Row], tables: dict[str, list[dict[str, Any]]]) -> None:
    console = Console()
    drawn = Table(title=f"bitgraft, {machine()}, {datetime.date.today()}")
    for column in ("what", "against", "to reach", "median", "middle half", ""):
        drawn.add_column(column)
    for row in rows:
        low, high = row.spread
        verdict = {True: "reached", False: "falls short", None: ""}[row.reached]
        limit = f"{row.limit:g}" if row.limit is not None else ""
        drawn.add_row(
            row.what, row.against, limit, f"{row.median:.3f}", f"{low:.3f} to {high:.3f}", verdict, end_section=True
        )
    if rows:
        console.print(drawn)
    for name, table in tables.items():
        grown = Table(title=name)
        for column in table[0]:
            grown.add_column(column.replace("_", " "))
        for line in table:
            grown.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in line.values()))
        console.print(grown)


if __name__ == "__main__":
    raise SystemExit(main())

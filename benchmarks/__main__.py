"""`python -m benchmarks`: measure rows, print them and write JSON; the exit code is 1 if a row misses its limit."""

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import serving, storage, tables, training
from benchmarks.measure import THREADS, Row

GROUPS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "step-wrn": lambda folder, rounds: training.steps("wrn4", 1.02, rounds),
    "step-resnet": lambda folder, rounds: training.steps("resnet50", 1.08, 2 * rounds),  # one row is close to its limit
    "convolutions": lambda folder, rounds: training.convolutions(rounds),
    "memory": lambda folder, rounds: training.memory(),
    "switch": lambda folder, rounds: serving.switch(folder, 10 * rounds),  # a few milliseconds each
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
    parser.add_argument("--rows", default=",".join(known), help=f"any of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=15, help="minimum number of rounds per row")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"))
    given = parser.parse_args()
    chosen = [name for name in given.rows.split(",") if name]
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"there are no rows {unknown[0]!r}; known: {', '.join(known)}")
    if not given.json.parent.is_dir():
        parser.error(f"the folder {str(given.json.parent)!r} of --json does not exist")
    torch.set_num_threads(THREADS)
    rows, grown = _measure(chosen, given.rounds)
    about = {"date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__}
    _write(given.json, about, rows, grown)
    if rows:
        print(tables.rows({**about, "rows": [row.plain() for row in rows]}))
    for name, table in grown.items():
        print(f"\n{name}\n\n{tables.growth(table)}")
    return 1 if any(row.reached is False for row in rows) else 0


def _measure(chosen: list[str], rounds: int) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
    rows: list[Row] = []
    grown: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            if name in GROWTH:
                grown[name] = GROWTH[name](Path(folder), rounds)
                continue
            for row in GROUPS[name](Path(folder), rounds):
                print(f"{row.what}: {row.median:.3f} times {row.against}", file=sys.stderr, flush=True)
                rows.append(row)
    return rows, grown


def _write(path: Path, about: dict[str, str], rows: list[Row], grown: dict[str, list[dict[str, Any]]]) -> None:
    """Update the JSON file: rows and tables measured now replace those of the same name."""
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "tables": {}}
    fresh = {row.key: row.plain() for row in rows}
    kept = {row["key"]: row for row in before["rows"]}
    merged = {**about, "rows": [*(kept | fresh).values()], "tables": before["tables"] | grown}
    path.write_text(json.dumps(merged, indent=1) + "\n")


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {THREADS} cores"


if __name__ == "__main__":
    raise SystemExit(main())

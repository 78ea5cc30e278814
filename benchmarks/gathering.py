"""Shared by the table scripts: suite runs, a JSON file that grows row by row, and a page between marks."""

import argparse
import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import machine
from benchmarks.tables import between_marks
from bitgraft.backbone.files import write_atomically
from bitgraft.paper.bench.reading import load_suite
from bitgraft.paper.bench.record import finished
from bitgraft.paper.bench.runner import Place
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.bench.worker import run_cell


def suite_at(root: Path, rows: Sequence[str], seeds: Sequence[int], domains: Sequence[str], steps: int | None) -> Suite:
    """Select part of decathlon-mini, with its data at `root`; `steps` shortens every training, to try a script."""
    suite = load_suite("decathlon-mini").chosen(rows, seeds, domains)
    suite = replace(suite, datasets=tuple(replace(d, data=f"{root.name}:{d.name}") for d in suite.datasets))
    return replace(suite, config={**suite.config, "steps": steps}) if steps else suite


def ensure(suite: Suite, cell: Cell, root: Path, runs: Path) -> None:
    """Train a run unless it has records."""
    if not finished(suite, runs, cell):
        run_cell(suite, cell, Place(root.parent, runs))


def so_far(path: Path, settings: dict[str, Any], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read earlier results, if they were made with the same settings."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**settings, "rows": []}
    if other := [f"{key} {results[key]}" for key, value in settings.items() if results[key] != value]:
        parser.error(f"{path} was made with {', '.join(other)}; use another --json file")
    return results


def add(path: Path, results: dict[str, Any], row: dict[str, Any]) -> None:
    results["rows"].append(row)
    results |= {"date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__}
    write_atomically(path, (json.dumps(results, indent=1) + "\n").encode())


def conclude(text: str, page: Path, mark: str, usual: bool) -> None:
    """Print the table and, with the usual settings, write it between the page's marks."""
    print(f"\n{text}")
    if usual:
        write_atomically(page, between_marks(page.read_text(), mark, text).encode())


def spread(values: Sequence[float], by: float = 1) -> str:
    """Format the standard deviation, divided by `by`; empty for a single value."""
    return f" ± {statistics.stdev(values) / by:.1f}" if len(values) > 1 else ""

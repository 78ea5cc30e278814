"""What methods cost to train, from the records."""

import json
import statistics
from collections.abc import Callable, Mapping

from bitgraft.report.records import Record
from bitgraft.report.results import Results, geometric_mean
from bitgraft.report.table import Line, Table, figure
from bitgraft.report.wording import name_of


def cost_table(results: Results) -> Table:
    """Seconds for each training image and peak memory, also relative to fine-tuning on the same data sets."""
    base = next((row for row in results.rows if results.method(row) == "finetune"), None)
    lines = []
    for row, title in results.rows.items():
        time, memory = _by_dataset(results, row, _seconds), _by_dataset(results, row, lambda run: run.peak_memory)
        lines.append(
            Line(
                title,
                (
                    figure(1000 * statistics.fmean(time.values()) if time else None, 2),
                    figure(_relative(time, _by_dataset(results, base, _seconds)), 2),
                    figure(statistics.fmean(memory.values()) / 1e6 if memory else None, 0),
                    figure(_relative(memory, _by_dataset(results, base, lambda run: run.peak_memory)), 2),
                ),
            )
        )
    notes = ["Ratios are geometric means over the data sets that both methods have."]
    if base is None:
        notes = ["There is no fine-tuning among the rows to compare with."]
    machines = {json.dumps(run.machine, sort_keys=True) for row in results.rows for run in results.of(row)}
    if len(machines) > 1:
        notes.append(f"The runs come from {len(machines)} machines or settings, so the figures may not compare.")
    headings = ("ms per training image", "relative to fine-tuning", "peak memory, MB", "memory, relative")
    return Table("cost", f"{name_of(results)}: cost of training", "Method", headings, tuple(lines), tuple(notes))


def _seconds(run: Record) -> float | None:
    return run.seconds / run.train_images_seen if run.seconds is not None and run.train_images_seen else None


def _by_dataset(results: Results, row: str | None, of: Callable[[Record], float | None]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in results.of(row) if row is not None else ():
        if (value := of(run)) is not None:
            found.setdefault(run.dataset, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _relative(mine: Mapping[str, float], theirs: Mapping[str, float]) -> float | None:
    return geometric_mean([mine[name] / theirs[name] for name in mine if theirs.get(name)])

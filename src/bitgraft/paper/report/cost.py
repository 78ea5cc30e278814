"""What methods cost to train, from the records."""

import json
import statistics
from collections.abc import Callable, Mapping

from bitgraft.paper.report.records import Record
from bitgraft.paper.report.results import Results, geometric_mean
from bitgraft.paper.report.table import Cell, Line, Table, figure
from bitgraft.paper.report.wording import circumstances, name_of

MEASURED = "Time in training steps, loading of images included; memory of the whole process, libraries included."
PROCESSOR = "The processor's time is without what other processes had of the machine."


def cost_table(results: Results) -> Table:
    """Time for each training image and peak memory, also relative to fine-tuning on the same data sets."""
    base = next((row for row in results.rows if results.method(row) == "finetune"), None)
    every = [run for row in results.rows for run in results.of(row)]
    shown = {heading: some for heading, some in QUANTITIES.items() if any(some[0](run) is not None for run in every)}
    lines = tuple(
        Line(title, tuple(cell for quantity in shown.values() for cell in _cells(results, row, base, *quantity[:2])))
        for row, title in results.rows.items()
    )
    headings = tuple(word for heading, (_, _, ratio) in shown.items() for word in (heading, ratio))
    return Table(
        "cost", f"{name_of(results)}: cost of training", "Method", headings, lines, _notes(results, base, every)
    )


def _notes(results: Results, base: str | None, every: list[Record]) -> tuple[str, ...]:
    notes = [MEASURED]
    if any(run.processor_seconds is not None for run in every):
        notes.append(PROCESSOR)
    if base is None:
        notes.append("There is no fine-tuning among the rows to compare with.")
    else:
        notes.append(f"Relative to {results.rows[base]}: the geometric mean over the data sets that both rows have.")
    if where := circumstances(every):
        notes.append(f"{where}.")
    machines = {json.dumps(run.machine, sort_keys=True) for run in every}
    if len(machines) > 1:
        notes.append(f"The runs come from {len(machines)} machines or settings, so the figures may not compare.")
    return tuple(notes)


Quantity = Callable[[Record], float | None]


def _per_image(seconds: float | None, run: Record) -> float | None:
    return 1000 * seconds / run.train_images_seen if seconds is not None and run.train_images_seen else None


QUANTITIES: Mapping[str, tuple[Quantity, int, str]] = {
    "ms per training image": (lambda run: _per_image(run.seconds, run), 2, "relative time"),
    "processor ms": (lambda run: _per_image(run.processor_seconds, run), 2, "relative processor time"),
    "peak memory, MB": (lambda run: None if run.peak_memory is None else run.peak_memory / 1e6, 0, "relative memory"),
}
"""Each with its decimals, and what its ratio is called."""


def _cells(results: Results, row: str, base: str | None, of: Quantity, decimals: int) -> tuple[Cell, Cell]:
    mine, theirs = (_by_dataset(results, which, of) for which in (row, base))
    ratio = geometric_mean([mine[name] / theirs[name] for name in mine if theirs.get(name)])
    return figure(statistics.fmean(mine.values()) if mine else None, decimals), figure(ratio, 2)


def _by_dataset(results: Results, row: str | None, of: Quantity) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in results.of(row) if row is not None else ():
        if (value := of(run)) is not None:
            found.setdefault(run.dataset, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}

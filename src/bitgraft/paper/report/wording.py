"""Captions and notes of the tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitgraft.paper.report.published import PublishedTable
from bitgraft.paper.report.records import Record, current_names
from bitgraft.paper.report.results import Results

PACKNET = (
    "PackNet's tasks are counted with the values that they own, since the backbone stays whole here; the paper prunes "
    "it and counts only which task has which weight."
)


def caption(results: Results, what: str) -> str:
    epoch = "epoch selected on validation" if results.selected else "last epoch"
    images = "validation set" if results.validation else "test set"
    seeds = "one seed"
    if len(results.seed_counts) > 1:
        seeds = "mean ± standard deviation (number of seeds), one seed where no spread is given"
    elif results.seed_counts - {1}:
        seeds = f"mean ± standard deviation over {max(results.seed_counts)} seeds"
    return f"{results.name}: {what} on the {images}, {epoch}, {seeds}"


def notes(results: Results, paper: PublishedTable | None) -> list[str]:
    unranked = [title for row, title in results.rows.items() if not results.ranked(row)]
    references = f"; not ranked, as references: {', '.join(unranked)}" if unranked else ""
    told = [f"Best in bold, second underlined{references}.", *_own_data(results)]
    if any(results.method(row) == "packnet" for row in results.rows):
        told.append(PACKNET)
    if missing := list(_missing(results)):
        told.append(f"Missing: {'; '.join(missing)}.")
    if mixed := [place for place, runs in results.runs.items() if len(set(map(_settings, runs))) > 1]:
        named = ", ".join(f"{results.rows[row]} on {results.datasets[dataset]}" for row, dataset in mixed)
        told.append(f"Seeds of one cell were run with different settings: {named}.")
    if paper:
        source = f'Rows of the paper: its table "{paper.caption}", not ranked'
        if set(paper.datasets) != set(results.datasets):
            source += f"; there over {len(paper.datasets)} data sets, whose images and splits need not be ours"
        told.append(f"{source}.")
    return told


def _own_data(results: Results) -> list[str]:
    """Which columns are the backbone's own, and for which rows."""
    own = [title for name, title in results.datasets.items() if any(results.inherits(r, name) for r in results.rows)]
    if not own:
        return []
    note = f"{', '.join(own)}: the backbone's own data, tried once; no task changes it, so each row has its accuracy"
    joint = [title for row, title in results.rows.items() if any(run.joint for run in results.of(row))]
    return [f"{note}, but for {', '.join(joint)}, whose backbone is another." if joint else f"{note}."]


def _missing(results: Results) -> Iterable[str]:
    for row, title in results.rows.items():
        names = [name for key, name in results.datasets.items() if not results.accuracies(row, key)]
        if names:
            yield f"{title} on {'all' if len(names) == len(results.datasets) else ', '.join(names)}"


def _settings(run: Record) -> str:
    return json.dumps([current_names(run.config) | {"seed": None}, dict(run.options)], sort_keys=True)


def cost_notes(runs: Sequence[Record], base: str | None) -> tuple[str, ...]:
    """`base` is the title of the row that the others are compared with."""
    told = ["Time in training steps, loading of images included; memory of the whole process, libraries included."]
    if any(run.processor_seconds is not None for run in runs):
        told.append("The processor's time is without what other processes had of the machine.")
    if base is None:
        told.append("There is no fine-tuning among the rows to compare with.")
    else:
        told.append(f"Relative to {base}: the geometric mean over the data sets that both rows have.")
    if where := circumstances(runs):
        told.append(f"{where}.")
    machines = {json.dumps(run.machine, sort_keys=True) for run in runs}
    if len(machines) > 1:
        told.append(f"The runs come from {len(machines)} machines or settings, so the figures may not compare.")
    return tuple(told)


def circumstances(records: Sequence[Record]) -> str:
    """When, with which versions and on which machines."""
    days = sorted({record.date[:10] for record in records if record.date})
    versions = _joined(
        ", ".join(f"{name} {record.versions[name]}" for name in ("bitgraft", "torch") if name in record.versions)
        for record in records
    )
    parts = (" to ".join(dict.fromkeys(days[:1] + days[-1:])), versions, _joined(_machine(r.machine) for r in records))
    return "; ".join(filter(None, parts))


def _joined(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(filter(None, words))))


def _machine(machine: Mapping[str, Any]) -> str:
    if "cores" not in machine:
        return ""
    threads = machine.get("threads")
    return (
        f"{machine.get('system')} {machine.get('processor')}, {machine['cores']} cores, {threads} thread"
        f"{'' if threads == 1 else 's'} for each run, {machine.get('gpu') or 'no GPU'}"
    )

"""Records gathered into a grid of rows by data sets: the numbers in its cells, captions and notes."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitgraft.paper.report.published import PublishedTable
from bitgraft.paper.report.records import ORIGINAL, Form, Record, Suite, current_names
from bitgraft.paper.scores import domain_titles

REFERENCES = ("classifier", "finetune")
"""Shown for comparison but not ranked, as in the paper: the least and the most that a task can cost."""
PACKNET = (
    "PackNet's tasks are counted with the values that they own, since the backbone stays whole here; the paper prunes "
    "it and counts only which task has which weight."
)
Measure = Callable[[str, float], float]
"""From a data set and an accuracy in per cent to what a table shows."""
Combine = Callable[[Iterable[float]], float]
"""Mean or sum."""


@dataclass(frozen=True)
class Stat:
    """A mean over seeds."""

    mean: float
    sd: float | None
    """Standard deviation (n - 1); None for a single seed."""
    n: int


@dataclass(frozen=True)
class Results:
    """All runs of one suite on one backbone."""

    suite: Suite
    form: Form
    backbone: str
    rows: Mapping[str, str]
    """Titles by name, in the order of the tables."""
    datasets: Mapping[str, str]
    runs: Mapping[tuple[str, str], Sequence[Record]]
    """By row and data set, one for each seed."""
    own: Mapping[str, Record] = field(default_factory=dict)
    """The backbone on its own data, by data set. No task changes it, so every row has this accuracy."""
    selected: bool = False
    validation: bool = False

    @property
    def name(self) -> str:
        return f"{self.suite.title or self.suite.name}, {self.backbone}"

    def accuracies(self, row: str, dataset: str) -> dict[int, float]:
        """Per cent, by seed."""
        if self.inherits(row, dataset):
            found = dict.fromkeys(sorted({run.seed for run in self.of(row)}), self._accuracy(self.own[dataset]))
        else:
            found = {run.seed: self._accuracy(run) for run in self.runs.get((row, dataset), ())}
        return {seed: 100 * value for seed, value in found.items() if value is not None}

    def _accuracy(self, run: Record) -> float | None:
        epoch = run.selected if self.selected else run.last
        return epoch.val_accuracy if self.validation else epoch.test_accuracy

    def inherits(self, row: str, dataset: str) -> bool:
        """Whether a row has the backbone's own accuracy there. A joint row trains the backbone, and has its own."""
        here = self.of(row)
        return dataset in self.own and bool(here) and not here[0].joint and not self.runs.get((row, dataset))

    def cell(self, row: str, dataset: str, measure: Measure) -> Stat | None:
        values = [measure(dataset, value) for value in self.accuracies(row, dataset).values()]
        return stat(values[:1] if self.inherits(row, dataset) else values)

    def whole(self, row: str, measure: Measure, combine: Combine) -> Stat | None:
        """Mean or total over the data sets, if all are there; its spread is over seeds that ran on all of them."""
        runs = [self.accuracies(row, dataset) for dataset in self.datasets]
        if not all(runs):
            return None
        if any(run.keys() != runs[0].keys() for run in runs):
            means = [self.cell(row, dataset, measure) for dataset in self.datasets]
            return Stat(combine([one.mean for one in means if one]), None, min(map(len, runs)))
        named = list(zip(self.datasets, runs, strict=True))
        return stat([combine([measure(name, run[seed]) for name, run in named]) for seed in runs[0]])

    def params(self, row: str) -> float | None:
        """(backbone + what each data set adds) / backbone, without heads."""
        runs = [self.runs.get((row, dataset), ()) for dataset in self.datasets if not self.inherits(row, dataset)]
        if not all(runs):
            return None
        return 1 + sum(statistics.fmean(run.bits / run.backbone_bits for run in some) for some in runs)

    @property
    def seed_counts(self) -> set[int]:
        """How many seeds the cells have; those that only repeat the backbone's accuracy do not count."""
        places = [(row, name) for row in self.rows for name in self.datasets if not self.inherits(row, name)]
        return {len(self.accuracies(row, name)) for row, name in places} - {0}

    def method(self, row: str) -> str | None:
        return next((run.method for run in self.of(row)), None)

    def of(self, row: str) -> list[Record]:
        return [run for dataset in self.datasets for run in self.runs.get((row, dataset), ())]

    def ranked(self, row: str) -> bool:
        return self.method(row) not in REFERENCES


def accuracy(dataset: str, value: float) -> float:
    """The plain measure."""
    return value


def stat(values: Sequence[float]) -> Stat | None:
    if not values:
        return None
    return Stat(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def gather(
    records: Sequence[Record], suites: Mapping[str, Suite], selected: bool = False, validation: bool = False
) -> list[Results]:
    """One grid for each suite and backbone, sorted by name."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.suite, record.backbone), []).append(record)
    return [
        _grid(suites.get(name, Suite(name)), backbone, groups[name, backbone], selected, validation)
        for name, backbone in sorted(groups)
    ]


def _grid(suite: Suite, backbone: str, records: list[Record], selected: bool, validation: bool) -> Results:
    found = {record.dataset for record in records}
    titles = {one.name: one.title or one.name for one in suite.datasets}
    form = suite.form or ("decathlon" if found | set(titles) <= set(domain_titles()) else "accuracy")
    if form == "decathlon" and not suite.datasets:
        titles = {name: title for name, title in domain_titles().items() if name in found}
    datasets = {**titles, **{name: name for name in sorted(found - set(titles))}}
    own = {record.dataset: record for record in records if record.row == ORIGINAL}
    trained = [record for record in records if record.row != ORIGINAL] or records
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(trained, key=lambda one: one.seed):
        runs.setdefault((record.row, record.dataset), []).append(record)
    rows = {one.row: one.title or one.row for one in suite.rows}
    recorded = {record.row: record.title or record.row for record in trained}
    rows |= {row: recorded[row] for row in sorted(set(recorded) - set(rows))}
    return Results(suite, form, backbone, rows, datasets, runs, own, selected, validation)


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

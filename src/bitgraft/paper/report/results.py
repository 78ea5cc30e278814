"""Records gathered into a grid of methods by data sets, and the numbers in its cells."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bitgraft.paper.report.records import ORIGINAL, Form, Record, Suite
from bitgraft.paper.scores import domain_titles

REFERENCES = ("classifier", "finetune")
"""What the paper compares with but does not rank: the least and the most that a task can cost."""
Measure = Callable[[str, float], float]
"""From a data set and an accuracy in per cent to what a table shows."""


@dataclass(frozen=True)
class Stat:
    """A mean over seeds."""

    mean: float
    sd: float | None
    """Standard deviation (n - 1); none for a single seed."""
    n: int


@dataclass(frozen=True)
class Results:
    """All runs of one suite on one backbone."""

    suite: Suite
    form: Form
    backbone: str
    rows: Mapping[str, str]
    """Label and title, in the order of the tables."""
    datasets: Mapping[str, str]
    runs: Mapping[tuple[str, str], Sequence[Record]]
    """By row and data set, one for each seed."""
    own: Mapping[str, Record] = field(default_factory=dict)
    """How the backbone does on its own data, by data set: so does every row, since no task changes it."""
    selected: bool = False
    validation: bool = False

    def accuracies(self, row: str, dataset: str) -> dict[int, float]:
        """Per cent, by seed."""
        runs = self.runs.get((row, dataset), ())
        found = {run.seed: self._accuracy(run) for run in runs}
        if self.lent(row, dataset):
            found = dict.fromkeys(sorted({run.seed for run in self.of(row)}), self._accuracy(self.own[dataset]))
        return {seed: 100 * value for seed, value in found.items() if value is not None}

    def _accuracy(self, run: Record) -> float | None:
        epoch = run.selected if self.selected else run.last
        return epoch.val if self.validation else epoch.test

    def lent(self, row: str, dataset: str) -> bool:
        """Whether a row has the backbone's own accuracy there; a joint one trains the backbone, and has its own."""
        here = self.of(row)
        return dataset in self.own and bool(here) and not here[0].joint and not self.runs.get((row, dataset))

    def cell(self, row: str, dataset: str, measure: Measure) -> Stat | None:
        values = [measure(dataset, value) for value in self.accuracies(row, dataset).values()]
        return stat(values[:1] if self.lent(row, dataset) else values)

    def whole(self, row: str, measure: Measure, combine: Callable[[Iterable[float]], float]) -> Stat | None:
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
        """All tasks against the backbone, heads apart: (backbone + what each data set adds) / backbone."""
        runs = [self.runs.get((row, dataset), ()) for dataset in self.datasets if not self.lent(row, dataset)]
        if not all(runs):
            return None
        return 1 + sum(statistics.fmean(run.bits / run.backbone_bits for run in some) for some in runs)

    def method(self, row: str) -> str | None:
        return next((run.method for run in self.of(row)), None)

    def of(self, row: str) -> list[Record]:
        return [run for dataset in self.datasets for run in self.runs.get((row, dataset), ())]

    def ranked(self, row: str) -> bool:
        return self.method(row) not in REFERENCES

    def missing(self) -> list[tuple[str, list[str]]]:
        """Titles of the rows that lack results, and of the data sets that they lack them on."""
        holes = [
            (title, [name for key, name in self.datasets.items() if not self.accuracies(row, key)])
            for row, title in self.rows.items()
        ]
        return [(title, names) for title, names in holes if names]


def accuracy(dataset: str, value: float) -> float:
    """The plainest measure."""
    return value


def stat(values: Sequence[float]) -> Stat | None:
    if not values:
        return None
    return Stat(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def geometric_mean(ratios: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios and min(ratios) > 0 else None


def gather(
    records: Sequence[Record], suites: Mapping[str, Suite], selected: bool = False, validation: bool = False
) -> list[Results]:
    """One grid for each suite and backbone, by name."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.suite, record.backbone), []).append(record)
    return [
        _grid(suites.get(name, Suite(name, title=name)), backbone, groups[name, backbone], selected, validation)
        for name, backbone in sorted(groups)
    ]


def _grid(suite: Suite, backbone: str, records: list[Record], selected: bool, validation: bool) -> Results:
    runs: dict[tuple[str, str], list[Record]] = {}
    rows = [record for record in records if record.row != ORIGINAL] or records
    own = {record.dataset: record for record in records if record.row == ORIGINAL}
    for record in sorted(rows, key=lambda one: one.seed):
        runs.setdefault((record.row, record.dataset), []).append(record)
    datasets = {**suite.datasets, **{name: name for name in sorted({r.dataset for r in records} - set(suite.datasets))}}
    form = suite.form or ("decathlon" if set(datasets) <= set(domain_titles()) else "accuracy")
    if form == "decathlon" and not suite.datasets:
        datasets = {name: title for name, title in domain_titles().items() if name in datasets} | {
            name: name for name in datasets if name not in domain_titles()
        }
    titles = {record.row: record.title for record in rows}
    named = {**suite.rows, **{row: titles[row] for row in sorted(set(titles) - set(suite.rows))}}
    return Results(suite, form, backbone, named, datasets, runs, own, selected, validation)

"""Records gathered into a grid of methods by data sets, and the numbers in its cells."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bitgraft.report.records import Form, Record, Suite
from bitgraft.scoring import domain_titles

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
    selected: bool = False

    def accuracies(self, row: str, dataset: str) -> dict[int, float]:
        """Per cent, by seed."""
        found = {run.seed: run.selected if self.selected else run.last for run in self.runs.get((row, dataset), ())}
        return {seed: 100 * value for seed, value in found.items() if value is not None}

    def cell(self, row: str, dataset: str, measure: Measure) -> Stat | None:
        return stat([measure(dataset, value) for value in self.accuracies(row, dataset).values()])

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
        runs = [self.runs.get((row, dataset), ()) for dataset in self.datasets]
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


def gather(records: Sequence[Record], suites: Mapping[str, Suite], selected: bool = False) -> list[Results]:
    """One grid for each suite and backbone, by name."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.suite, record.backbone), []).append(record)
    return [
        _grid(suites.get(name, Suite(name, title=name)), backbone, groups[name, backbone], selected)
        for name, backbone in sorted(groups)
    ]


def _grid(suite: Suite, backbone: str, records: list[Record], selected: bool) -> Results:
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda one: one.seed):
        runs.setdefault((record.row, record.dataset), []).append(record)
    datasets = {**suite.datasets, **{name: name for name in sorted({r.dataset for r in records} - set(suite.datasets))}}
    form = suite.form or ("decathlon" if set(datasets) <= set(domain_titles()) else "accuracy")
    if form == "decathlon" and not suite.datasets:
        datasets = {name: title for name, title in domain_titles().items() if name in datasets} | {
            name: name for name in datasets if name not in domain_titles()
        }
    titles = {record.row: record.title for record in records}
    rows = {**suite.rows, **{row: titles[row] for row in sorted(set(titles) - set(suite.rows))}}
    return Results(suite, form, backbone, rows, datasets, runs, selected)

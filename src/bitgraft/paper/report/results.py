"""Group records into tables of rows by data sets, compute their cells, and read the paper's tables."""

import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitgraft.errors import BitgraftError
from bitgraft.paper.figures import OURS
from bitgraft.paper.report.records import ORIGINAL, Form, Record, Suite
from bitgraft.paper.scores import domain_titles

REFERENCES = ("classifier", "finetune")
"""Methods that are shown but not ranked, as in the paper: the least and the most that a task can cost."""
Measure = Callable[[str, float], float]
"""Converts an accuracy in per cent on a data set to the number a table shows."""
Combine = Callable[[Iterable[float]], float]
"""Mean or sum."""


def spelled_out(title: str) -> str:
    """Return the unabbreviated title of a row or data set."""
    return str(published()["spelled"].get(title, title))


@dataclass(frozen=True)
class Stat:
    mean: float
    sd: float | None = None
    """Standard deviation (n - 1); None for a single seed."""
    n: int | None = None  # seeds


def stat(values: Sequence[float]) -> Stat | None:
    """Return mean and standard deviation over seeds."""
    if not values:
        return None
    return Stat(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def accuracy(dataset: str, value: float) -> float:
    """The measure of tables that show accuracies."""
    return value


@dataclass(frozen=True)
class Row:
    """The runs of one row on one backbone."""

    title: str
    by_dataset: Mapping[str, Sequence[Record]]
    """One record per seed."""
    own: Mapping[str, Record]
    """The backbone on its own data. No task changes it, so rows not trained on them share this accuracy."""
    selected: bool = False
    validation: bool = False

    @property
    def runs(self) -> list[Record]:
        return [run for runs in self.by_dataset.values() for run in runs]

    @property
    def method(self) -> str | None:
        return next((run.method for run in self.runs), None)

    @property
    def joint(self) -> bool:
        """Whether the backbone was trained as well."""
        return any(run.joint for run in self.runs)

    @property
    def ours(self) -> bool:
        """Whether pages and figures highlight it."""
        return any(run.row == OURS for run in self.runs)

    @property
    def ranked(self) -> bool:
        return self.method not in REFERENCES

    def inherits(self, dataset: str) -> bool:
        """Return whether the row has the backbone's own accuracy on this data set."""
        return dataset in self.own and bool(self.runs) and not self.joint and not self.by_dataset.get(dataset)

    def accuracies(self, dataset: str) -> dict[int, float]:
        """Return accuracies in per cent by seed."""
        if self.inherits(dataset):
            found = dict.fromkeys(sorted({run.seed for run in self.runs}), self._accuracy(self.own[dataset]))
        else:
            found = {run.seed: self._accuracy(run) for run in self.by_dataset.get(dataset, ())}
        return {seed: 100 * value for seed, value in found.items() if value is not None}

    def _accuracy(self, run: Record) -> float | None:
        epoch = run.selected if self.selected else run.last
        return epoch.val_accuracy if self.validation else epoch.test_accuracy

    def cell(self, dataset: str, measure: Measure) -> Stat | None:
        values = [measure(dataset, value) for value in self.accuracies(dataset).values()]
        return stat(values[:1] if self.inherits(dataset) else values)

    def total(self, datasets: Collection[str], measure: Measure, combine: Combine) -> Stat | None:
        """Return the mean or sum over the data sets, if all have results; the deviation needs the same seeds on all."""
        runs = {name: self.accuracies(name) for name in datasets}
        if not all(runs.values()):
            return None
        seeds, *others = (list(run) for run in runs.values())
        if any(other != seeds for other in others):
            means = [self.cell(name, measure) for name in datasets]
            return Stat(combine([one.mean for one in means if one]), None, min(map(len, runs.values())))
        return stat([combine([measure(name, run[seed]) for name, run in runs.items()]) for seed in seeds])

    def parameters(self, datasets: Collection[str]) -> float | None:
        """Return the bits of backbone and tasks divided by those of the backbone, without heads."""
        runs = [self.by_dataset.get(name) for name in datasets if not self.inherits(name)]
        if not all(runs):
            return None
        return 1 + sum(statistics.fmean(run.bits / run.backbone_bits for run in some or ()) for some in runs)

    @property
    def k(self) -> list[str]:
        """k0 to k3: constants, or ✓ if learned."""
        options = {**_defaults(self.runs[0].method), **self.runs[0].options} if self.runs else {}
        values = [options.get(f"k{i}", "–") for i in range(4)]
        return [{"learn": "✓", "auto": "1"}.get(v, v) if isinstance(v, str) else f"{v:g}" for v in values]


def _defaults(method: str) -> dict[str, Any]:
    from bitgraft.methods import registry  # imports torch, which no other table needs

    try:
        return asdict(registry.get(method).options)
    except BitgraftError:  # a method of another installation
        return {}


@dataclass(frozen=True)
class PublishedRow:
    """A row of the paper, with the interface of our own rows."""

    row: str
    title: str
    values: Mapping[str, float]
    """By data set: accuracy in per cent, or S."""
    params: str | None = None
    whole: float | None = None
    """The printed mean or total over all data sets."""
    k: Sequence[str] = ()
    ranked = False

    def parameters(self, datasets: Collection[str]) -> str | None:
        return self.params

    def cell(self, dataset: str, measure: Measure) -> Stat | None:
        return Stat(self.values[dataset]) if dataset in self.values else None

    def total(self, datasets: Collection[str], measure: Measure, combine: Combine) -> Stat | None:
        """Return the mean or sum over these data sets: the printed one if they are all of the table's."""
        if self.whole is not None and set(datasets) == set(self.values):
            return Stat(self.whole)  # rounded once, from more decimals than the cells have
        return Stat(combine([self.values[name] for name in datasets])) if self.values.keys() >= set(datasets) else None


AnyRow = Row | PublishedRow


@dataclass(frozen=True)
class Results:
    """All runs of one suite on one backbone."""

    suite: Suite
    form: Form
    backbone: str
    rows: Mapping[str, Row]  # in the order of the tables
    datasets: Mapping[str, str]  # titles by name
    selected: bool = False
    validation: bool = False

    @property
    def name(self) -> str:
        return f"{self.suite.title or self.suite.name}, {self.backbone}"

    @property
    def seed_counts(self) -> set[int]:
        """The numbers of seeds in the cells, without those that repeat the backbone's accuracy."""
        places = [(row, name) for row in self.rows.values() for name in self.datasets if not row.inherits(name)]
        return {len(row.accuracies(name)) for row, name in places} - {0}

    @property
    def tried(self) -> list[str]:
        """The data sets with any result."""
        return [name for name in self.datasets if any(row.accuracies(name) for row in self.rows.values())]


def gather(
    records: Sequence[Record], suites: Mapping[str, Suite], selected: bool = False, validation: bool = False
) -> list[Results]:
    """Group records by suite and backbone, sorted by name."""
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
    datasets = {name: spelled_out(title) for name, title in titles.items()}
    datasets |= {name: name for name in sorted(found - set(titles))}
    own = {record.dataset: record for record in records if record.row == ORIGINAL}
    trained = sorted((r for r in records if r.row != ORIGINAL), key=lambda r: (r.row, r.seed)) or records
    names = {one.row: one.title or one.row for one in suite.rows}
    names |= {record.row: record.title or record.row for record in trained if record.row not in names}
    names = {row: spelled_out(title) for row, title in names.items()}
    taken = Counter(names.values())
    rows = {}
    for row, title in names.items():
        title = f"{title} ({row})" if taken[title] > 1 else title
        runs = {name: [run for run in trained if (run.row, run.dataset) == (row, name)] for name in datasets}
        rows[row] = Row(title, runs, own, selected, validation)
    return Results(suite, form, backbone, rows, datasets, selected, validation)


@dataclass(frozen=True)
class PublishedTable:
    form: str
    """accuracy, decathlon, scores or ablation."""
    backbone: str
    caption: str
    datasets: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


@cache
def published() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """Return every table of the paper, in its order."""
    return tuple(_table(**table) for table in published()["table"])


def _table(datasets: list[str], rows: list[dict[str, Any]], **about: str) -> PublishedTable:
    for row in rows:
        row |= {"title": spelled_out(row["title"]), "values": dict(zip(datasets, row["values"], strict=True))}
    made = [PublishedRow(**row) for row in rows]
    return PublishedTable(**about, datasets=tuple(datasets), rows=tuple(made))


def published_table(form: str, backbone: str, datasets: Iterable[str]) -> PublishedTable | None:
    """Return the paper's table of this form that shares a data set with ours, preferably on the same backbone."""
    ours = set(datasets)
    candidates = [table for table in published_tables() if table.form == form and ours & set(table.datasets)]
    return next((table for table in candidates if table.backbone == backbone), candidates[0] if candidates else None)

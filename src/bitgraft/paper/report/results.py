"""Group records into tables of rows by data sets, compute their cells, and read the paper's tables."""

import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitgraft.methods import registry
from bitgraft.paper.figures import OURS
from bitgraft.paper.report.records import ORIGINAL, Form, Record, Suite
from bitgraft.paper.scores import domain_titles

REFERENCES = ("classifier", "finetune")
"""Methods that are shown but not ranked, as in the paper: the least and the most that a task can cost."""
Combine = Callable[[Iterable[float]], float]
"""Mean or sum."""


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


@dataclass(frozen=True)
class Row:
    """The runs of one row on one backbone."""

    title: str
    by_dataset: Mapping[str, Sequence[Record]]
    """One record per seed."""
    values: Mapping[str, Mapping[int, float]]
    """By data set and seed: accuracy in per cent, or S."""
    inherited: Collection[str]
    """The backbone's own data. No task changes it, so rows not trained on them share its accuracy."""

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

    def cell(self, dataset: str) -> Stat | None:
        values = list(self.values[dataset].values())
        return stat(values[:1] if dataset in self.inherited else values)

    def total(self, datasets: Collection[str], combine: Combine) -> Stat | None:
        """Return the mean or sum over the data sets, if all have results; the deviation needs the same seeds on all."""
        runs = [self.values[name] for name in datasets]
        if not all(runs):
            return None
        if any(list(run) != list(runs[0]) for run in runs):
            means = [cell.mean for name in datasets if (cell := self.cell(name))]
            return Stat(combine(means), None, min(map(len, runs)))
        return stat([combine([run[seed] for run in runs]) for seed in runs[0]])

    def parameters(self, datasets: Collection[str]) -> float | None:
        """Return the bits of backbone and tasks divided by those of the backbone, without heads."""
        runs = [self.by_dataset[name] for name in datasets if name not in self.inherited]
        if not all(runs):
            return None
        return 1 + sum(statistics.fmean(run.bits / run.backbone_bits for run in some) for some in runs)

    @property
    def k(self) -> list[str]:
        """k0 to k3: constants, or ✓ if learned."""
        options = dict(self.runs[0].options) if self.runs else {}
        if self.method in registry.method_names():  # not one of another installation
            options = asdict(registry.get(self.method).options) | options
        values = [options.get(f"k{i}", "–") for i in range(4)]
        return [{"learn": "✓", "auto": "1"}.get(v, v) if isinstance(v, str) else f"{v:g}" for v in values]


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
    ranked = ours = False

    def parameters(self, datasets: Collection[str]) -> str | None:
        return self.params

    def cell(self, dataset: str) -> Stat | None:
        return Stat(self.values[dataset]) if dataset in self.values else None

    def total(self, datasets: Collection[str], combine: Combine) -> Stat | None:
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
        rows = self.rows.values()
        return {len(row.values[name]) for row in rows for name in self.datasets if name not in row.inherited} - {0}

    @property
    def tried(self) -> list[str]:
        """The data sets with any result."""
        return [name for name in self.datasets if any(row.values[name] for row in self.rows.values())]


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
    taken, rows = Counter(names.values()), {}
    for row, title in names.items():
        runs = {name: [run for run in trained if (run.row, run.dataset) == (row, name)] for name in datasets}
        every = [run for some in runs.values() for run in some]
        inherits = bool(every) and not any(run.joint for run in every)
        inherited = {name for name in own if inherits and not runs[name]}
        values = {name: [(run.seed, run) for run in some] for name, some in runs.items()}
        values |= {name: [(seed, own[name]) for seed in sorted({run.seed for run in every})] for name in inherited}
        percent = {name: _per_cent(pairs, selected, validation) for name, pairs in values.items()}
        rows[row] = Row(f"{title} ({row})" if taken[title] > 1 else title, runs, percent, inherited)
    return Results(suite, form, backbone, rows, datasets, selected, validation)


def _per_cent(runs: Iterable[tuple[int, Record]], selected: bool, validation: bool) -> dict[int, float]:
    """Return the accuracies of these seeds, without missing ones."""
    epochs = {seed: run.selected if selected else run.last for seed, run in runs}
    found = {seed: epoch.val_accuracy if validation else epoch.test_accuracy for seed, epoch in epochs.items()}
    return {seed: 100 * value for seed, value in found.items() if value is not None}


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


def spelled_out(title: str) -> str:
    """Return the unabbreviated title of a row or data set."""
    return str(published()["spelled"].get(title, title))


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """Return every table of the paper, in its order."""
    return tuple(_published_table(**table) for table in published()["table"])


def _published_table(datasets: list[str], rows: list[dict[str, Any]], **about: str) -> PublishedTable:
    filled = [
        row | {"title": spelled_out(row["title"]), "values": dict(zip(datasets, row["values"], strict=True))}
        for row in rows
    ]
    return PublishedTable(**about, datasets=tuple(datasets), rows=tuple(PublishedRow(**row) for row in filled))


def published_table(form: str, backbone: str, datasets: Iterable[str]) -> PublishedTable | None:
    """Return the paper's table of this form that shares a data set with ours, preferably on the same backbone."""
    ours = set(datasets)
    candidates = [table for table in published_tables() if table.form == form and ours & set(table.datasets)]
    return next((table for table in candidates if table.backbone == backbone), candidates[0] if candidates else None)

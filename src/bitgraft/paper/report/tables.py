"""The paper's tables from results: accuracy, decathlon accuracies and scores, ablation, and the cost of training."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bitgraft.errors import BitgraftError, DataError
from bitgraft.paper.report.published import PublishedRow, published_table
from bitgraft.paper.report.records import Record
from bitgraft.paper.report.render import DASH, Cell, Line, Mark, Table
from bitgraft.paper.report.results import Combine, Measure, Results, Stat, accuracy, caption, cost_notes, notes
from bitgraft.paper.scores import Baselines, challenge_baselines, decathlon_score, domain_titles, read_baselines

LEARNED = "✓ is learned; k0 = 1 holds where a norm undoes the scale, elsewhere it is learned."
Quantity = Callable[[Record], float | None]
QUANTITIES: Sequence[tuple[str, str, Quantity, int]] = (
    ("ms per training image", "relative time", lambda run: run.per_image(run.seconds), 2),
    ("processor ms", "relative processor time", lambda run: run.per_image(run.processor_seconds), 2),
    ("peak memory, MB", "relative memory", lambda run: run.peak_memory and run.peak_memory / 1e6, 0),
)
"""Headings of a cost and of its ratio to fine-tuning, the cost of a run, and decimals."""


@dataclass(frozen=True)
class Column:
    heading: str
    ours: Callable[[str], Cell]
    """The cell of one of our rows, by its name."""
    theirs: Callable[[PublishedRow], Cell] = lambda row: Cell(DASH)
    ranked: bool = False


def tables(results: Results, published: bool = False, baseline: str | None = None) -> list[Table]:
    """All tables of one suite on one backbone."""
    cost = cost_table(results)
    if results.form == "accuracy":
        return [accuracy_table(results, published), cost]
    if results.form == "ablation":
        return [ablation_table(results, published), cost]
    main, baselines = decathlon_table(results, published), baselines_of(results, baseline)
    if baselines is None:
        told = f"No S yet: {results.suite.baseline}, which it is measured against, lacks results, or has no errors."
        return [replace(main, notes=(*main.notes, told)), cost]
    return [main, score_table(results, baselines, published), cost]


def accuracy_table(results: Results, published: bool = False) -> Table:
    """The ImageNet-to-Sketch form: data sets down, methods across, the parameters last."""
    columns = [*_by_dataset(results, accuracy, 1), _params(results, "# Params")]
    table = _table(results, "accuracy", columns, "accuracy" if published else None)
    cells = zip(*(line.cells for line in table.lines), strict=True)
    lines = tuple(Line(heading, column) for heading, column in zip(table.headings, cells, strict=True))
    return replace(table, corner="Dataset", headings=tuple(line.title for line in table.lines), lines=lines)


def decathlon_table(results: Results, published: bool = False) -> Table:
    """Accuracies of each domain and their mean."""
    columns = [_params(results, "Params"), *_by_dataset(results, accuracy, 1, "Mean", statistics.fmean)]
    return _table(results, "accuracies", columns, "decathlon" if published else None)


def score_table(results: Results, baselines: Baselines, published: bool = False) -> Table:
    """S of each domain and the total; over seeds, the mean of S, not S of the mean."""
    here = [name for name in domain_titles() if name in results.datasets]
    note = f"S is measured against {baselines.source}: 250 is as good, 1000 has no errors."
    if len(here) < len(domain_titles()) or len(here) < len(results.datasets):
        note += (
            f" The total is over {len(results.datasets)} data sets, of the decathlon's 10 domains {len(here)}: not to "
            "be compared with totals over all ten."
        )
    columns = [_params(results, "Params"), *_by_dataset(results, score_measure(baselines), 0, "Score", sum)]
    table = _table(results, "scores", columns, "scores" if published else None)
    return replace(table, caption=caption(results, "decathlon score S"), notes=(note, *table.notes))


def score_measure(baselines: Baselines) -> Measure:
    return lambda dataset, value: decathlon_score(100 - value, baselines.error(dataset))


def ablation_table(results: Results, published: bool = False) -> Table:
    """k0 to k3 of each row (a constant, or learned), then its accuracies."""
    columns = [*(_k(results, i) for i in range(4)), *_by_dataset(results, accuracy, 1)]
    table = _table(results, "ablation", columns, "ablation" if published else None)
    return replace(table, notes=(LEARNED, *table.notes))


def cost_table(results: Results) -> Table:
    """Time for each training image and peak memory, also relative to fine-tuning on the same data sets."""
    base = next((row for row in results.rows if results.method(row) == "finetune"), None)
    columns: list[Column] = []
    for heading, ratio, quantity, decimals in QUANTITIES:
        costs = {row: _costs(results, row, quantity) for row in results.rows}
        if any(costs.values()):
            columns.append(Column(heading, partial(_mean_cost, costs, decimals)))
            columns.append(Column(ratio, partial(_relative_cost, costs, base)))
    every = [run for row in results.rows for run in results.of(row)]
    stated = cost_notes(every, None if base is None else results.rows[base])
    return replace(_table(results, "cost", columns), caption=f"{results.name}: cost of training", notes=stated)


def _table(results: Results, name: str, columns: Sequence[Column], form: str | None = None) -> Table:
    """Methods down, the paper's (of its table of this form) last; best and second are marked in ranked columns."""
    paper = published_table(form, results.backbone, results.datasets) if form else None
    theirs, cells = paper.rows if paper else (), []
    for column in columns:
        ours = [column.ours(row) for row in results.rows]
        if column.ranked:
            compared = [cell.text != DASH and results.ranked(row) for row, cell in zip(results.rows, ours, strict=True)]
            shown = [float(cell.text) if yes else None for cell, yes in zip(ours, compared, strict=True)]
            ours = [replace(cell, mark=mark) for cell, mark in zip(ours, marks(shown), strict=True)]
        cells.append([*ours, *map(column.theirs, theirs)])
    titles = [*results.rows.values(), *(f"{row.title} (paper)" for row in theirs)]
    lines = tuple(Line(title, row) for title, row in zip(titles, zip(*cells, strict=True), strict=True))
    headings = tuple(column.heading for column in columns)
    stated = caption(results, "accuracy in per cent")
    return Table(name, stated, "Method", headings, lines, tuple(notes(results, paper)))


def marks(shown: Sequence[float | None]) -> list[Mark | None]:
    """Best and second, as printed. Equal values share a place: after two that are best there is no second.

    Nothing is marked where nobody scored anything.
    """
    order = sorted((value for value in shown if value is not None), reverse=True)
    if len(order) < 2 or order[0] <= 0:
        return [None] * len(shown)
    second = order[1] if order[1] < order[0] else None
    return [None if v is None else "best" if v == order[0] else "second" if v == second else None for v in shown]


def number(value: Stat | float | None, decimals: int, show_n: bool = False) -> Cell:
    """A number, or a mean with its spread; a dash where there is none."""
    if value is None:
        return Cell(DASH)
    if not isinstance(value, Stat):
        return Cell(f"{value:.{decimals}f}", value)
    spread = "" if value.sd is None else f" ± {value.sd:.{decimals}f}" + (f" ({value.n})" if show_n else "")
    return Cell(f"{value.mean:.{decimals}f}", value.mean, value.sd, value.n, spread)


def _by_dataset(
    results: Results, measure: Measure, decimals: int, whole: str = "", combine: Combine = sum
) -> list[Column]:
    """A column for each data set, and one for the mean or total under the heading `whole`."""
    show_n = len(results.seed_counts) > 1

    def column(name: str, title: str) -> Column:
        return Column(
            title,
            ours=lambda row: number(results.cell(row, name, measure), decimals, show_n),
            theirs=lambda row: number(row.values.get(name), decimals),
            ranked=True,
        )

    last = Column(
        whole,
        ours=lambda row: number(results.whole(row, measure, combine), decimals, show_n),
        theirs=lambda row: number(row.over(results.datasets, combine), decimals),
        ranked=True,
    )
    return [*(column(name, title) for name, title in results.datasets.items()), *([last] if whole else [])]


def _params(results: Results, heading: str) -> Column:
    return Column(heading, lambda row: number(results.params(row), 2), lambda row: Cell(row.params or DASH))


def _k(results: Results, i: int) -> Column:
    def ours(row: str) -> Cell:
        runs = results.of(row)
        options = {**_defaults(runs[0].method), **runs[0].options} if runs else {}
        value = options.get(f"k{i}", DASH)
        return Cell({"learn": "✓", "auto": "1"}.get(value, value) if isinstance(value, str) else f"{value:g}")

    return Column(f"k{i}", ours, lambda row: Cell(row.k[i]))


def _defaults(method: str) -> dict[str, Any]:
    from bitgraft.methods import registry  # brings torch, which no other table needs

    try:
        return dict(registry.plain(registry.get(method).options))
    except BitgraftError:  # a method of another installation
        return {}


Costs = dict[str, dict[str, float]]
"""By row and data set."""


def _costs(results: Results, row: str, quantity: Quantity) -> dict[str, float]:
    """The mean over seeds, by data set."""
    found: dict[str, list[float]] = {}
    for run in results.of(row):
        if (value := quantity(run)) is not None:
            found.setdefault(run.dataset, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _mean_cost(costs: Costs, decimals: int, row: str) -> Cell:
    return number(statistics.fmean(costs[row].values()) if costs[row] else None, decimals)


def _relative_cost(costs: Costs, base: str | None, row: str) -> Cell:
    theirs = costs[base] if base else {}
    ratios = [value / theirs[name] for name, value in costs[row].items() if theirs.get(name)]
    return number(statistics.geometric_mean(ratios) if ratios and min(ratios) > 0 else None, 2)


def baselines_of(results: Results, given: str | None) -> Baselines | None:
    """Errors of a row of these results, of a file, or the challenge's; None while the suite's own row has gaps."""
    row = given or results.suite.baseline
    if row is None:
        return challenge_baselines()
    if given is not None and row not in results.rows:
        if not Path(row).is_file():
            raise DataError(f"--baseline {row}: neither a row of {results.suite.name} nor a file")
        return read_baselines(Path(row))
    tried = [name for name in results.datasets if any(results.accuracies(other, name) for other in results.rows)]
    found = {name: results.cell(row, name, accuracy) for name in tried}
    errors = {name: 100 - cell.mean for name, cell in found.items() if cell and cell.mean < 100}
    if lacking := [name for name in tried if name not in errors]:
        if given is None:
            return None
        raise DataError(f"{given} cannot be the baseline: it has no result, or no errors, on {', '.join(lacking)}")
    return Baselines(errors, f"{results.rows.get(row, row)} in this table")

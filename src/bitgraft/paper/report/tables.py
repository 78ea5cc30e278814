"""Build the paper's tables: accuracy, decathlon accuracies and scores, ablation, and the cost of training."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from bitgraft.errors import DataError
from bitgraft.paper.report.records import Record, current_names
from bitgraft.paper.report.render import DASH, Cell, Line, Mark, Table
from bitgraft.paper.report.results import AnyRow, Combine, PublishedTable, Results, Row, Stat, published_table
from bitgraft.paper.scores import Baselines, challenge_baselines, decathlon_score, domain_titles, read_baselines

LEARNED = "✓: learned. k0 = 1 applies to layers followed by a norm that undoes the scale; elsewhere k0 is learned."
PACKNET = (
    "PackNet's tasks are counted with the values they own, because the backbone is not pruned here; the paper prunes "
    "it and counts only which task owns which weight."
)
Quantity = Callable[[Record], float | None]
QUANTITIES: Sequence[tuple[str, str, Quantity, int]] = (
    ("ms per training image", "relative time", lambda run: run.per_image(run.seconds), 2),
    ("processor ms", "relative processor time", lambda run: run.per_image(run.processor_seconds), 2),
    ("peak memory, MB", "relative memory", lambda run: run.peak_memory and run.peak_memory / 1e6, 0),
)
"""Heading of a cost, heading of its ratio to fine-tuning, the cost of a run, and decimals."""


class Column(NamedTuple):
    heading: str
    cell: Callable[[AnyRow], Cell]
    ranked: bool = False


def tables(results: Results, published: bool = False, baseline: str | None = None) -> list[Table]:
    """Return all tables of one suite on one backbone."""
    cost = cost_table(results)
    if results.form == "accuracy":
        return [accuracy_table(results, published), cost]
    if results.form == "ablation":
        return [ablation_table(results, published), cost]
    main, baselines = decathlon_table(results, published), baselines_of(results, baseline)
    if baselines is None:
        note = f"No S yet: the baseline row {results.suite.baseline} lacks results, or has an error of 0."
        return [replace(main, notes=(*main.notes, note)), cost]
    return [main, score_table(results, baselines, published), cost]


def accuracy_table(results: Results, published: bool = False) -> Table:
    """The ImageNet-to-Sketch form: one line per data set, one column per method, parameters in the last line."""
    columns = [*_by_dataset(results, 1), _params(results, "# Params")]
    table = _table(results, "accuracy", columns, "accuracy" if published else None)
    cells = zip(*(line.cells for line in table.lines), strict=True)
    lines = tuple(Line(heading, column) for heading, column in zip(table.headings, cells, strict=True))
    return replace(table, corner="Dataset", headings=tuple(line.title for line in table.lines), lines=lines)


def decathlon_table(results: Results, published: bool = False) -> Table:
    """Accuracy on each domain, and the mean."""
    columns = [_params(results), *_by_dataset(results, 1, "Mean", fmean)]
    return _table(results, "accuracies", columns, "decathlon" if published else None)


def score_table(results: Results, baselines: Baselines, published: bool = False) -> Table:
    """S on each domain, and the total. Over seeds it is the mean of S, not S of the mean."""
    here = [name for name in domain_titles() if name in results.datasets]
    note = f"S is relative to {baselines.source}: 250 matches it, 1000 means no errors."
    if len(here) < len(domain_titles()) or len(here) < len(results.datasets):
        note += (
            f" The total covers {len(results.datasets)} data sets, {len(here)} of them among the decathlon's 10 "
            "domains, and is not comparable with totals over all ten."
        )
    columns = [_params(results), *_by_dataset(results, 0, "Score", sum)]
    form = "scores" if published else None
    table = _table(scored(results, baselines), "scores", columns, form, "decathlon score S")
    return replace(table, notes=(note, *table.notes))


def scored(results: Results, baselines: Baselines) -> Results:
    """Return the results with S in place of each accuracy."""

    def scores(row: Row) -> dict[str, dict[int, float]]:
        return {
            name: {seed: decathlon_score(100 - value, baselines.error(name)) for seed, value in values.items()}
            for name, values in row.values.items()
        }

    return replace(results, rows={name: replace(row, values=scores(row)) for name, row in results.rows.items()})


def ablation_table(results: Results, published: bool = False) -> Table:
    """k0 to k3 of each row, then its accuracies."""
    ks = [Column(f"k{i}", lambda row, i=i: Cell(row.k[i])) for i in range(4)]  # type: ignore[misc]
    table = _table(results, "ablation", [*ks, *_by_dataset(results, 1)], "ablation" if published else None)
    return replace(table, notes=(LEARNED, *table.notes))


def cost_table(results: Results) -> Table:
    """Time per training image and peak memory, absolute and relative to fine-tuning on the same data sets."""
    base = next((row for row in results.rows.values() if row.method == "finetune"), None)
    headings: list[str] = []
    lines: dict[str, list[Cell]] = {name: [] for name in results.rows}
    for heading, ratio, quantity, decimals in QUANTITIES:
        costs = {name: _costs(row, quantity) for name, row in results.rows.items()}
        if not any(costs.values()):
            continue
        headings += [heading, ratio]
        theirs = _costs(base, quantity) if base else {}
        for name, held in costs.items():
            ratios = [cost / theirs[dataset] for dataset, cost in held.items() if theirs.get(dataset)]
            relative = geometric_mean(ratios) if ratios and min(ratios) > 0 else None
            lines[name] += [number(fmean(held.values()) if held else None, decimals), number(relative, 2)]
    runs = [run for row in results.rows.values() for run in row.runs]
    remarks = tuple(cost_notes(runs, base.title if base else None))
    rows = tuple(Line(row.title, tuple(lines[name]), row.ours) for name, row in results.rows.items())
    return Table("cost", f"{results.name}: cost of training", "Method", tuple(headings), rows, remarks)


def _costs(row: Row, quantity: Quantity) -> Mapping[str, float]:
    """Return the mean over seeds, by data set."""
    found = {
        name: [cost for run in runs if (cost := quantity(run)) is not None] for name, runs in row.by_dataset.items()
    }
    return {name: fmean(values) for name, values in found.items() if values}


def _table(
    results: Results, name: str, columns: Sequence[Column], form: str | None, what: str = "accuracy in per cent"
) -> Table:
    """Build a table with one line per method, the paper's last; ranked columns mark best and second."""
    paper = published_table(form, results.backbone, results.datasets) if form else None
    rows: list[AnyRow] = [*results.rows.values(), *(paper.rows if paper else ())]
    titles = [row.title if isinstance(row, Row) else f"{row.title} (paper)" for row in rows]
    cells = []
    for column in columns:
        made = [column.cell(row) for row in rows]
        if column.ranked:
            compared = [row.ranked and cell.text != DASH for row, cell in zip(rows, made, strict=True)]
            shown = [float(cell.text) if yes else None for cell, yes in zip(made, compared, strict=True)]
            made = [replace(cell, mark=mark) for cell, mark in zip(made, marks(shown), strict=True)]
        cells.append(made)
    ours = [row.ours for row in rows]
    lines = tuple(Line(*parts) for parts in zip(titles, zip(*cells, strict=True), ours, strict=True))
    headings = tuple(column.heading for column in columns)
    return Table(name, caption(results, what), "Method", headings, lines, tuple(notes(results, paper)))


def marks(shown: Sequence[float | None]) -> list[Mark | None]:
    """Mark best and second. Ties share a mark, and two that are best leave no second; all zeros are not marked."""
    order = sorted((value for value in shown if value is not None), reverse=True)
    if len(order) < 2 or order[0] <= 0:
        return [None] * len(shown)
    second = order[1] if order[1] < order[0] else None
    return [None if v is None else "best" if v == order[0] else "second" if v == second else None for v in shown]


def number(value: Stat | float | str | None, decimals: int, show_n: bool = False) -> Cell:
    """Format a number, or a mean with its standard deviation; None becomes a dash."""
    if value is None or isinstance(value, str):
        return Cell(value or DASH)
    if not isinstance(value, Stat):
        return Cell(f"{value:.{decimals}f}", value)
    spread = "" if value.sd is None else f" ± {value.sd:.{decimals}f}" + (f" ({value.n})" if show_n else "")
    return Cell(f"{value.mean:.{decimals}f}", value.mean, value.sd, value.n, spread)


def _by_dataset(results: Results, decimals: int, whole: str = "", combine: Combine = sum) -> list[Column]:
    """Return a column per data set, then one for the mean or total under the heading `whole`."""
    show_n = len(results.seed_counts) > 1

    def column(heading: str, value: Callable[[AnyRow], Stat | None]) -> Column:
        return Column(heading, lambda row: number(value(row), decimals, show_n), ranked=True)

    each = [column(title, lambda row, n=name: row.cell(n)) for name, title in results.datasets.items()]  # type: ignore[misc]
    return [*each, column(whole, lambda row: row.total(results.datasets, combine))] if whole else each


def _params(results: Results, heading: str = "Params") -> Column:
    return Column(heading, lambda row: number(row.parameters(results.datasets), 2))


def baselines_of(results: Results, given: str | None) -> Baselines | None:
    """Return the baseline errors: of a row, of a file, or the challenge's; None while the suite's row has gaps."""
    name = given or results.suite.baseline
    if name is None:
        return challenge_baselines()
    row = results.rows.get(name)
    if given is not None and row is None:
        if not Path(name).is_file():
            raise DataError(f"--baseline {name}: neither a row of {results.suite.name} nor a file")
        return read_baselines(Path(name))
    found = {dataset: row.cell(dataset) for dataset in results.tried} if row else {}
    errors = {dataset: 100 - cell.mean for dataset, cell in found.items() if cell and cell.mean < 100}
    lacking = [dataset for dataset in results.tried if dataset not in errors]
    if row and not lacking:
        return Baselines(errors, f"{row.title} in this table")
    if given is not None:
        raise DataError(f"{given} cannot be the baseline: it has no result, or an error of 0, on {', '.join(lacking)}")
    return None


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
    rows, titles = results.rows.values(), results.datasets
    unranked = ", ".join(row.title for row in rows if not row.ranked)
    found = [f"Best in bold, second underlined{f'; references, not ranked: {unranked}' if unranked else ''}."]
    if own := ", ".join(title for name, title in titles.items() if any(name in row.inherited for row in rows)):
        joint = " (except joint training, which changes the backbone)" if any(row.joint for row in rows) else ""
        found.append(f"{own}: the backbone's own data. No task changes it, so all rows share its accuracy{joint}.")
    if any(row.method == "packnet" for row in rows):
        found.append(PACKNET)
    gaps = {row.title: [title for name, title in titles.items() if not row.values[name]] for row in rows}
    if missing := [f"{row} on {'all' if len(g) == len(titles) else ', '.join(g)}" for row, g in gaps.items() if g]:
        found.append(f"Missing: {'; '.join(missing)}.")
    places = ((f"{row.title} on {titles[name]}", runs) for row in rows for name, runs in row.by_dataset.items())
    if mixed := [place for place, runs in places if len(set(map(_settings, runs))) > 1]:
        found.append(f"Seeds of one cell were run with different settings: {', '.join(mixed)}.")
    if paper:
        other = f"; it covers {len(paper.datasets)} data sets, whose images and splits may differ from ours"
        same = set(paper.datasets) == set(titles)
        found.append(f'Rows of the paper: its table "{paper.caption}", not ranked{"" if same else other}.')
    return found


def _settings(run: Record) -> str:
    return json.dumps([current_names(run.config) | {"seed": None}, dict(run.options)], sort_keys=True)


def cost_notes(runs: Sequence[Record], base: str | None) -> list[str]:
    """Return the notes of the cost table; `base` is the title of the row that others are compared with."""
    found = ["Time of training steps, including image loading; memory of the whole process, including libraries."]
    if any(run.processor_seconds is not None for run in runs):
        found.append("Processor time excludes other processes on the machine.")
    if base is None:
        found.append("No relative cost: there is no fine-tuning row.")
    else:
        found.append(f"Relative to {base}: the geometric mean over the data sets that both rows have.")
    if where := circumstances(runs):
        found.append(f"{where}.")
    return found


def circumstances(records: Sequence[Record]) -> str:
    """Return the dates, versions and machines of these runs."""
    days = sorted({record.date[:10] for record in records if record.date})
    versions = (", ".join(f"{p} {r.versions[p]}" for p in ("bitgraft", "torch") if p in r.versions) for r in records)
    machines = (_machine(**record.machine) for record in records if "cores" in record.machine)
    return "; ".join(
        filter(None, [" to ".join(dict.fromkeys(days[:1] + days[-1:])), _joined(versions), _joined(machines)])
    )


def _joined(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(filter(None, words))))


def _machine(cores: int, threads: int = 1, gpu: Any = None, **_: Any) -> str:
    return f"{cores} cores, {threads} {'thread' if threads == 1 else 'threads'} per run, {gpu or 'no GPU'}"

"""The paper's tables from results: accuracy, decathlon accuracies and scores and ablation."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitgraft.errors import BitgraftError, DataError
from bitgraft.paper.report.cost import cost_table
from bitgraft.paper.report.published import PublishedRow, PublishedTable, published_table
from bitgraft.paper.report.records import Record
from bitgraft.paper.report.results import Measure, Results, accuracy
from bitgraft.paper.report.table import DASH, Cell, Line, Table, figure, number, ranked, transposed
from bitgraft.paper.report.wording import caption, mixed_seeds, notes
from bitgraft.paper.scores import Baselines, challenge_baselines, decathlon_score, domain_titles, read_baselines

K = ("k0", "k1", "k2", "k3")
LEARNED = "✓ is learned; k0 = 1 holds where a norm undoes the scale, elsewhere it is learned."
WORDS = {"learn": "✓", "auto": "1"}


def tables(results: Results, published: bool = False, baseline: str | None = None) -> list[Table]:
    """All tables of one suite on one backbone."""
    main, cost = MAIN[results.form](results, published), cost_table(results)
    if results.form != "decathlon":
        return [main, cost]
    baselines = baselines_of(results, baseline)
    if baselines is None:
        told = f"No S yet: {results.suite.baseline}, which it is measured against, lacks results, or has no errors."
        return [replace(main, notes=(*main.notes, told)), cost]
    return [main, score_table(results, baselines, published), cost]


def accuracy_table(results: Results, published: bool = False) -> Table:
    """The ImageNet-to-Sketch form: data sets down, methods across, the parameters last."""
    paper = _paper("accuracy", results, published)
    lines = [
        Line(title, (*_cells(results, row, accuracy, 1), figure(results.params(row), 2)), results.ranked(row))
        for row, title in results.rows.items()
    ]
    for row in paper.rows if paper else ():
        lines.append(Line(_theirs(row), (*_printed(row, results, 1), Cell(row.params or DASH))))
    table = Table(
        name="accuracy",
        caption=caption(results, "accuracy in per cent"),
        corner="Method",
        headings=(*results.datasets.values(), "# Params"),
        lines=tuple(lines),
        notes=notes(results, paper),
    )
    return transposed(ranked(table, range(len(results.datasets))), "Dataset")


def decathlon_table(results: Results, published: bool = False) -> Table:
    return _by_method("accuracies", "accuracy in per cent", results, accuracy, statistics.fmean, 1, published)


def score_table(results: Results, baselines: Baselines, published: bool = False) -> Table:
    """S of each domain and the total; over seeds, the mean of S, not S of the mean."""
    here = [title for name, title in domain_titles().items() if name in results.datasets]
    note = f"S is measured against {baselines.source}: 250 is as good, 1000 has no errors."
    if len(here) < len(domain_titles()) or len(here) < len(results.datasets):
        note += (
            f" The total is over {len(results.datasets)} data sets, of the decathlon's 10 domains {len(here)}: not to "
            "be compared with totals over all ten."
        )
    return _by_method(
        "scores",
        "decathlon score S",
        results,
        score_measure(baselines),
        sum,
        0,
        published,
        (note,),
    )


def score_measure(baselines: Baselines) -> Measure:
    return lambda dataset, value: decathlon_score(100 - value, baselines.error(dataset))


def ablation_table(results: Results, published: bool = False) -> Table:
    """A row for each choice of k0 to k3, of the surrogate and of channel-wise parameters."""
    paper = _paper("ablation", results, published)
    lines = [
        Line(title, (*map(Cell, _ks(results.of(row))), *_cells(results, row, accuracy, 1)), results.ranked(row))
        for row, title in results.rows.items()
    ]
    for row in paper.rows if paper else ():
        lines.append(Line(_theirs(row), (*map(Cell, row.k), *_printed(row, results, 1))))
    table = Table(
        name="ablation",
        caption=caption(results, "accuracy in per cent"),
        corner="Method",
        headings=(*K, *results.datasets.values()),
        lines=tuple(lines),
        notes=(LEARNED, *notes(results, paper)),
    )
    return ranked(table, range(len(K), len(K) + len(results.datasets)))


MAIN: Mapping[str, Callable[[Results, bool], Table]] = {
    "accuracy": accuracy_table,
    "decathlon": decathlon_table,
    "ablation": ablation_table,
}


def baselines_of(results: Results, given: str | None) -> Baselines | None:
    """The challenge's, a file's, or the mean errors of a row of these results; none while the suite's row has gaps."""
    if given is None:
        own = results.suite.baseline
        if own is None:
            return challenge_baselines()
        return None if _unfit(results, own) else _errors_of(results, own)
    if given not in results.rows:
        if not Path(given).is_file():
            raise DataError(f"--baseline {given}: neither a row of {results.suite.name} nor a file")
        return read_baselines(Path(given))
    if unfit := _unfit(results, given):
        raise DataError(f"{given} cannot be the baseline: it has no result, or no errors, on {', '.join(unfit)}")
    return _errors_of(results, given)


def _unfit(results: Results, row: str) -> list[str]:
    """Data sets on which there is something to score, but no error of this row to measure it against."""
    tried = [name for name in results.datasets if any(results.accuracies(other, name) for other in results.rows)]
    found = {name: results.cell(row, name, accuracy) for name in tried}
    return [name for name, cell in found.items() if cell is None or cell.mean >= 100]


def _errors_of(results: Results, row: str) -> Baselines:
    found = {name: results.cell(row, name, accuracy) for name in results.datasets}
    errors = {name: 100 - cell.mean for name, cell in found.items() if cell}
    return Baselines(errors, f"{results.rows[row]} in this table")


def _by_method(
    name: str,
    what: str,
    results: Results,
    measure: Measure,
    combine: Callable[[Iterable[float]], float],
    decimals: int,
    published: bool,
    remarks: tuple[str, ...] = (),
) -> Table:
    """The decathlon's form: methods down, parameters and data sets across, mean or total last."""
    paper = _paper({"accuracies": "decathlon"}.get(name, name), results, published)
    show_n = mixed_seeds(results)
    lines = [
        Line(
            title,
            (
                figure(results.params(row), 2),
                *_cells(results, row, measure, decimals),
                number(results.whole(row, measure, combine), decimals, show_n),
            ),
            results.ranked(row),
        )
        for row, title in results.rows.items()
    ]
    for row in paper.rows if paper else ():
        whole = row.over(results.datasets, combine)
        lines.append(
            Line(
                _theirs(row),
                (Cell(row.params or DASH), *_printed(row, results, decimals), figure(whole, decimals)),
            )
        )
    headings = ("Params", *results.datasets.values(), "Mean" if name == "accuracies" else "Score")
    table = Table(name, caption(results, what), "Method", headings, tuple(lines), (*remarks, *notes(results, paper)))
    return ranked(table, range(1, len(headings)))


def _cells(results: Results, row: str, measure: Measure, decimals: int) -> list[Cell]:
    show_n = mixed_seeds(results)
    return [number(results.cell(row, name, measure), decimals, show_n) for name in results.datasets]


def _printed(row: PublishedRow, results: Results, decimals: int) -> list[Cell]:
    return [figure(row.values.get(name), decimals) for name in results.datasets]


def _theirs(row: PublishedRow) -> str:
    return f"{row.title} (paper)"


def _paper(form: str, results: Results, wanted: bool) -> PublishedTable | None:
    return published_table(form, results.backbone, results.datasets) if wanted else None


def _ks(runs: list[Record]) -> list[str]:
    """What each k is in a row: a constant, or learned."""
    if not runs:
        return [DASH] * len(K)
    options = {**_defaults(runs[0].method), **runs[0].options}
    return [_k(options[name]) if name in options else DASH for name in K]


def _k(value: Any) -> str:
    return WORDS.get(value, value) if isinstance(value, str) else f"{value:g}"


def _defaults(method: str) -> dict[str, Any]:
    from bitgraft.methods import registry  # brings torch, which no other table needs

    try:
        return dict(registry.plain(registry.get(method).options))
    except BitgraftError:  # a method of another installation
        return {}

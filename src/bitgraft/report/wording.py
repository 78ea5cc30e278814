"""What stands above and below the tables."""

import json

from bitgraft.report.published import PublishedTable
from bitgraft.report.records import Record
from bitgraft.report.results import Results


def _seed_counts(results: Results) -> set[int]:
    counts = {len(results.accuracies(row, name)) for row in results.rows for name in results.datasets}
    return counts - {0}


def mixed_seeds(results: Results) -> bool:
    return len(_seed_counts(results)) > 1


def name_of(results: Results) -> str:
    return f"{results.suite.title or results.suite.name}, {results.backbone}"


def caption(results: Results, what: str) -> str:
    epoch = "epoch selected on validation" if results.selected else "last epoch"
    counts = _seed_counts(results)
    if len(counts) > 1:
        seeds = "mean ± standard deviation (number of seeds), one seed where no spread is given"
    else:
        count = max(counts, default=0)
        seeds = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    return f"{name_of(results)}: {what} on the test set, {epoch}, {seeds}"


def notes(results: Results, paper: PublishedTable | None) -> tuple[str, ...]:
    told = []
    unranked = [title for row, title in results.rows.items() if not results.ranked(row)]
    if unranked:
        told.append(f"Best in bold, second underlined; not ranked, as references: {', '.join(unranked)}.")
    else:
        told.append("Best in bold, second underlined.")
    if holes := results.missing():
        listed = "; ".join(
            f"{title} on {'all' if len(names) == len(results.datasets) else ', '.join(names)}" for title, names in holes
        )
        told.append(f"Missing: {listed}.")
    if mixed := [f"{results.rows[row]} on {results.datasets[name]}" for row, name in _mixed_settings(results)]:
        told.append(f"Seeds of one cell were run with different settings: {', '.join(mixed)}.")
    if paper:
        source = f'Rows of the paper: its table "{paper.caption}", not ranked'
        if set(paper.datasets) != set(results.datasets):
            source += f"; there over {len(paper.datasets)} data sets, whose images and splits need not be ours"
        told.append(f"{source}.")
    return tuple(told)


def _mixed_settings(results: Results) -> list[tuple[str, str]]:
    def settings(run: Record) -> str:
        kept = {key: value for key, value in run.config.items() if key != "seed"}
        return json.dumps([kept, dict(run.options)], sort_keys=True)

    return [place for place, runs in results.runs.items() if len({settings(run) for run in runs}) > 1]

"""What stands above and below the tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitgraft.paper.report.published import PublishedTable
from bitgraft.paper.report.records import Record
from bitgraft.paper.report.results import Results

PACKNET = (
    "PackNet's tasks are counted with the values that they own, since the backbone stays whole here; the paper prunes "
    "it and counts only which task has which weight."
)


def _seed_counts(results: Results) -> set[int]:
    counts = {
        len(results.accuracies(row, name))
        for row in results.rows
        for name in results.datasets
        if not results.lent(row, name)
    }
    return counts - {0}


def mixed_seeds(results: Results) -> bool:
    return len(_seed_counts(results)) > 1


def name_of(results: Results) -> str:
    return f"{results.suite.title or results.suite.name}, {results.backbone}"


def caption(results: Results, what: str) -> str:
    epoch = "epoch selected on validation" if results.selected else "last epoch"
    images = "validation set" if results.validation else "test set"
    counts = _seed_counts(results)
    if len(counts) > 1:
        seeds = "mean ± standard deviation (number of seeds), one seed where no spread is given"
    else:
        count = max(counts, default=0)
        seeds = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    return f"{name_of(results)}: {what} on the {images}, {epoch}, {seeds}"


def notes(results: Results, paper: PublishedTable | None) -> tuple[str, ...]:
    told = []
    unranked = [title for row, title in results.rows.items() if not results.ranked(row)]
    if unranked:
        told.append(f"Best in bold, second underlined; not ranked, as references: {', '.join(unranked)}.")
    else:
        told.append("Best in bold, second underlined.")
    told += _own_note(results)
    if any(results.method(row) == "packnet" for row in results.rows):
        told.append(PACKNET)
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


def _own_note(results: Results) -> list[str]:
    """Which columns are the backbone's own, and for whom."""
    lent = [title for name, title in results.datasets.items() if any(results.lent(row, name) for row in results.rows)]
    if not lent:
        return []
    note = f"{', '.join(lent)}: the backbone's own data, tried once; no task changes it, so each row has its accuracy"
    joint = [title for row, title in results.rows.items() if any(run.joint for run in results.of(row))]
    return [f"{note}, but for {', '.join(joint)}, whose backbone is another." if joint else f"{note}."]


def circumstances(records: Sequence[Record]) -> str:
    """When, with what and on which machine."""
    contents = [record.content for record in records]
    days = _distinct(str(content["date"])[:10] for content in contents if content.get("date"))
    versions = _distinct(
        ", ".join(f"{name} {version[name]}" for name in ("bitgraft", "torch") if name in version)
        for version in (content.get("versions") or {} for content in contents)
    )
    machines = _distinct(_machine(record.machine) for record in records)
    parts = (" to ".join(dict.fromkeys(days[:1] + days[-1:])), " and ".join(versions), " and ".join(machines))
    return "; ".join(part for part in parts if part)


def _machine(machine: Mapping[str, Any]) -> str:
    if "cores" not in machine:
        return ""
    threads = machine.get("threads")
    return (
        f"{machine.get('system')} {machine.get('processor')}, {machine['cores']} cores, {threads} thread"
        f"{'' if threads == 1 else 's'} for each run, {machine.get('gpu') or 'no GPU'}"
    )


def _distinct(words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word})


def _mixed_settings(results: Results) -> list[tuple[str, str]]:
    def settings(run: Record) -> str:
        kept = {key: value for key, value in run.config.items() if key != "seed"}
        return json.dumps([kept, dict(run.options)], sort_keys=True)

    return [place for place, runs in results.runs.items() if len({settings(run) for run in runs}) > 1]

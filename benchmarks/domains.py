"""Write the tables of docs/results/domains.md: `python -m benchmarks.domains RECORDS...`.

RECORDS are run folders of `bitgraft bench` or records.jsonl files of the suites domains, bits, domains-default and
domains-grid. All accuracies are those of the best epoch on validation, in per cent. An asterisk marks rows with runs of
earlier settings (earlier.jsonl). Tables are written between marks:

- rows: test accuracy of every method at 1,000 steps, mean over seeds;
- default: the same at the length that `bitgraft train` chooses;
- settings: test accuracy of what `domains-grid` tried for each method at 250 steps. The line "left out" takes, for each
  domain, the setting with the best mean validation accuracy on all other domains;
- ablation: what each setting of `full` is worth.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.tables import EARLIER, between_marks, read_with_earlier
from bitgraft.backbone.files import write_atomically
from bitgraft.paper.bench.reading import load_suite
from bitgraft.paper.report.records import Record

PAGE = Path("docs/results/domains.md")
DOMAINS = {dataset.name: dataset.title for dataset in load_suite("domains").datasets}
GRID = "domains-grid"
SCREEN = ("cub", "dtd", "omniglot", "gtsrb")
"""Settings are tried on these first; good ones on all."""
PRESET = ("norms-1e-2", "lora8-corrected-eps-1e-4", "piggyback-bn-5e-4", "full-2e-2", "finetune-2e-2")
"""Rows of the grid with the settings of the `default` preset."""
OURS = "full-2e-2"
ABLATION = tuple(
    f"full-{part}" for part in ("hard", "uncorrected", "uncentred", "unclipped", "unsmoothed", "batch", "unscaled")
)


@dataclass
class Row:
    """The runs of one row of a suite: seed -> domain -> record."""

    title: str
    method: str
    seeds: dict[int, dict[str, Record]]

    @property
    def name(self) -> str:
        """The title, with an asterisk if a run had earlier settings."""
        return self.title + " *" * any(EARLIER in r.where for runs in self.seeds.values() for r in runs.values())

    def accuracy(self, domain: str, what: str = "test_accuracy") -> float | None:
        """Mean over the seeds that have this domain."""
        found = [100 * getattr(runs[domain].selected, what) for runs in self.seeds.values() if domain in runs]
        return mean(found) if found else None

    def mean(self, domains: Iterable[str] = DOMAINS, what: str = "test_accuracy") -> float | None:
        """Mean over these domains; None if one is missing."""
        values = [value for name in domains if (value := self.accuracy(name, what)) is not None]
        return mean(values) if len(values) == len(list(domains)) else None

    def spread(self) -> float | None:
        """Standard deviation of the mean over all domains, between seeds that have them all."""
        whole = [runs for runs in self.seeds.values() if runs.keys() >= DOMAINS.keys()]
        means = [mean(100 * (runs[name].selected.test_accuracy or 0) for name in DOMAINS) for runs in whole]
        return stdev(means) if len(means) > 1 else None

    @property
    def bits(self) -> float | None:
        stated = [
            record.bits_per_weight
            for runs in self.seeds.values()
            for record in runs.values()
            if record.bits_per_weight is not None
        ]
        return mean(stated) if stated else None


def collect(records: Iterable[Record], suites: Sequence[str]) -> dict[str, Row]:
    """Return row -> its runs."""
    rows: dict[str, Row] = {}
    for record in records:
        if record.suite in suites and record.selected.test_accuracy is not None:
            row = rows.setdefault(record.row, Row(record.title or record.row, record.method, defaultdict(dict)))
            row.seeds[record.seed][record.dataset] = record
    return rows


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *lines))


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def comparison(rows: Iterable[tuple[str, Row]]) -> str:
    """A line per row: bits, seeds, accuracy on each domain and in the mean."""
    lines = []
    for title, row in rows:
        spread = f" ± {row.spread():.1f}" if row.spread() is not None else ""
        total = row.mean()
        bits = "32" if row.method == "finetune" else f"{row.bits:.2g}" if row.bits is not None else ""
        cells = [shown(row.accuracy(name)) for name in DOMAINS]
        lines.append([title, bits, str(len(row.seeds)), *cells, f"**{total:.1f}**{spread}" if total else ""])
    return table(["", "bits", "seeds", *DOMAINS.values(), "**mean**"], lines)


def chosen(rows: dict[str, Row], left_out: str) -> str:
    """Return the setting with the best mean validation accuracy, one domain left out."""
    rest = [name for name in DOMAINS if name != left_out]
    return max(rows, key=lambda row: rows[row].mean(rest, "val_accuracy") or 0)


def settings(grid: dict[str, Row]) -> str:
    """A line per setting, and per method one for those chosen with one domain left out."""
    lines = []
    by_method: dict[str, dict[str, Row]] = defaultdict(dict)
    for name, row in grid.items():
        if name not in ABLATION:
            by_method[row.method][name] = row
    for method, rows in by_method.items():
        for name, row in sorted(rows.items(), key=lambda pair: pair[1].mean(SCREEN, "val_accuracy") or 0):
            means = [row.mean(part, what) for part in (SCREEN, DOMAINS) for what in ("val_accuracy", "test_accuracy")]
            title = f"**{row.name}**" if name in PRESET else row.name
            lines.append([title, *(shown(row.accuracy(name)) for name in DOMAINS), *map(shown, means)])
        complete = {name: row for name, row in rows.items() if row.mean() is not None}
        if len(complete) > 1:
            picks = {name: chosen(complete, name) for name in DOMAINS}
            cells = [complete[pick].accuracy(name) or 0 for name, pick in picks.items()]
            lines.append([f"*{method}, left out*", *map(shown, cells), "", "", "", shown(mean(cells))])
    head = ["", *DOMAINS.values(), "four, validation", "four, test", "ten, validation", "ten, test"]
    return table(head, lines)


def ablation(grid: dict[str, Row]) -> str:
    """What `full` loses without each setting, with the standard error over domains."""
    lines = []
    for row in (grid[name] for name in ABLATION if name in grid):
        pairs = [(grid[OURS].accuracy(name), row.accuracy(name)) for name in DOMAINS]
        losses = [before - without for before, without in pairs if before is not None and without is not None]
        error = stdev(losses) / len(losses) ** 0.5
        worse = f"{sum(loss > 0 for loss in losses)} of {len(losses)}"
        lines.append([row.title, f"{mean(losses):+.1f} ± {error:.1f}", worse])
    return table(["", "points lost without it", "domains that lose"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    records = read_with_earlier(parser.parse_args().records)
    long, grid = collect(records, ("domains", "bits")), collect(records, (GRID,))
    whole = [(row.name, row) for row in long.values() if row.mean() is not None and "," not in row.title]
    whole = [
        (grid["classifier"].name.replace("probe", "probe, 250 steps"), grid["classifier"]),
        *sorted(whole, key=lambda pair: pair[1].mean() or 0),
    ]
    page = PAGE.read_text()
    tables = {
        "rows": comparison(whole),
        "default": comparison((row.name, row) for row in collect(records, ("domains-default",)).values()),
        "settings": settings(grid),
        "ablation": ablation(grid),
    }
    for mark, text in tables.items():
        page = between_marks(page, f"domains:{mark}", text)
        print(f"\n{text}")
    write_atomically(PAGE, page.encode())


if __name__ == "__main__":
    main()

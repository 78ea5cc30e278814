"""Print tables over domains: `python -m benchmarks.domains RECORDS...`.

RECORDS are run folders of `bitgraft bench` or records.jsonl files. The first table has the test accuracy of every row
on every domain, at the best epoch on validation. The second chooses among the settings (rows) of each method: for each
domain it takes the setting with the best mean validation accuracy on all other domains, and shows its test accuracy.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from bitgraft.paper.report.records import Record, read_records

Accuracies = dict[str, dict[str, dict[str, float]]]


def by_method(records: list[Record], what: str) -> Accuracies:
    """Return method -> row -> domain -> accuracy in percent at the selected epoch, averaged over seeds."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in records:
        value = getattr(record.selected, what)
        found[record.method][record.row][record.dataset].append(100 * value)
    return {
        method: {row: {name: mean(seeds) for name, seeds in domains.items()} for row, domains in rows.items()}
        for method, rows in found.items()
    }


def comparison(records: list[Record]) -> str:
    """Return a table with one line per domain and one column per row, and means of the complete rows."""
    rows = {
        row: values for of_method in by_method(records, "test_accuracy").values() for row, values in of_method.items()
    }
    domains = sorted({record.dataset for record in records})
    lines = ["| | " + " | ".join(rows) + " |", "|---" + "|--:" * len(rows) + "|"]
    for name in domains:
        cells = [f"{row[name]:.1f}" if name in row else "" for row in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    means = [f"{mean(row.values()):.1f}" if len(row) == len(domains) else "" for row in rows.values()]
    return "\n".join([*lines, f"| mean | {' | '.join(means)} |"])


def chosen(rows: dict[str, dict[str, float]], left_out: str) -> str:
    """Return the setting with the best mean validation accuracy, one domain left out."""
    return max(rows, key=lambda row: mean(value for name, value in rows[row].items() if name != left_out))


def settings(records: list[Record]) -> str:
    validation, test = by_method(records, "val_accuracy"), by_method(records, "test_accuracy")
    domains = sorted({record.dataset for record in records})
    complete = {
        method: {row: values for row, values in rows.items() if set(values) == set(domains)}
        for method, rows in validation.items()
    }
    lines = [
        "| method | setting, times chosen | " + " | ".join(domains) + " | mean |",
        "|---" * (len(domains) + 3) + "|",
    ]
    for method, rows in complete.items():
        if not rows:
            continue
        picks = {name: chosen(rows, name) for name in domains}
        values = [test[method][picks[name]][name] for name in domains]
        counts = ", ".join(f"{row} {list(picks.values()).count(row)}" for row in rows if row in picks.values())
        lines.append(f"| {method} | {counts} | " + " | ".join(f"{v:.1f}" for v in values) + f" | {mean(values):.1f} |")
    lines += ["", "Every setting, validation and test accuracy, mean over the domains:", ""]
    lines += ["| row | validation | test |", "|---|---|---|"]
    for method, rows in complete.items():
        for row, values in rows.items():
            lines.append(f"| {row} | {mean(values.values()):.1f} | {mean(test[method][row].values()):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    records = [record for path in parser.parse_args().records for record in read_records(path)]
    print(comparison(records), settings(records), sep="\n\n")


if __name__ == "__main__":
    main()

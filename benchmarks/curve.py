"""Plot mean accuracy over domains against bits per weight: `python -m benchmarks.curve RECORDS...`.

RECORDS are run folders of `bitgraft bench` or records.jsonl files. Bits per weight are the size of the task file
without its head, divided by the number of weights that `full` masks. A row is plotted once it has results on every
domain, unless it is a trial of other settings (a comma in its title: "Fine-tuning, 1e-3"); its error bar is the
standard deviation over seeds. Writes the figure and its points as JSON, and prints them.

Records written before they held bits per weight take them from the task file in the run folder, else from the points of
the last figure.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.tables import read_with_earlier
from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import inspect_file
from bitgraft.paper.figures import COLOURS, draw, save
from bitgraft.paper.report.records import Record
from bitgraft.store import Store

POINTS = Path("benchmarks/results/curve.json")

FEWEST = 0.02  # bits; below, the file is its head and a few numbers
Runs = dict[tuple[str, str], dict[int, dict[str, tuple[float | None, float]]]]
"""(backbone, row title) -> seed -> domain -> (bits per weight, test accuracy in percent)."""


def read(sources: list[Path], earlier: list[dict[str, Any]]) -> Runs:
    """Read the records; `earlier` are the points of the last figure."""
    known = {(point["backbone"], point["row"]): point["bits"] for point in earlier}
    found: Runs = defaultdict(lambda: defaultdict(dict))
    for record in read_with_earlier(sources):
        row = record.backbone, record.title or record.row
        if "," in row[1]:
            continue
        bits = record.bits_per_weight if record.bits_per_weight is not None else _file_bits(record)
        if record.selected.test_accuracy is not None:
            accuracy = 100 * record.selected.test_accuracy
            found[row][record.seed][record.dataset] = known.get(row) if bits is None else bits, accuracy
    return found


def _file_bits(record: Record) -> float | None:
    """Return the bits per weight of the task file in the record's run folder, if it is there."""
    store = Path(record.where).resolve().parent.parent.parent  # STORE/runs/DATASET/record.json
    if not (Store.exists(store) and Store(store).path(record.dataset).exists()):
        return None
    return inspect_file(Store(store).path(record.dataset)).bits_per(Store(store).size.weights)


def points(found: Runs) -> list[dict[str, Any]]:
    """Return one point per backbone and row, averaged over the seeds that have every domain.

    A row whose bits per weight are unknown is reported on stderr and left out.
    """
    common: dict[str, set[str]] = {}
    for (backbone, _), seeds in found.items():
        most = max(map(set, seeds.values()), key=len)
        common[backbone] = max(common.get(backbone, set()), most, key=len)
    rows = []
    for (backbone, title), seeds in found.items():
        whole = [seed for seed in seeds.values() if set(seed) >= common[backbone]]
        bits = [size for seed in whole for name in common[backbone] if (size := seed[name][0]) is not None]
        if bits:
            accuracies = [mean(seed[name][1] for name in common[backbone]) for seed in whole]
            spread = stdev(accuracies) if len(whole) > 1 else None
            rows.append({"backbone": backbone, "row": title, "bits": mean(bits), "accuracy": mean(accuracies)})
            rows[-1] |= {"spread": spread, "seeds": len(whole), "domains": len(common[backbone])}
        elif whole:
            print(f"left out {title} on {backbone}: its records and {POINTS} lack bits per weight", file=sys.stderr)
    return sorted(rows, key=lambda row: (row["backbone"], row["bits"]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| backbone | method | bits per weight | mean accuracy, % | seeds | domains |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        spread = f" ± {row['spread']:.1f}" if row["spread"] is not None else ""
        cells = (row["backbone"], row["row"], f"{row['bits']:.2f}", f"{row['accuracy']:.1f}{spread}")
        lines.append(f"| {' | '.join(cells)} | {row['seeds']} | {row['domains']} |")
    return "\n".join(lines)


def panel(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Ours in one colour, LoRA's ranks in another; methods that add no bits are a line across."""
    free = [row for row in rows if row["bits"] < FEWEST]
    for row in free:
        axes.axhline(row["accuracy"], color="grey", linestyle=":")
        axes.annotate(row["row"], (1, row["accuracy"]), (-2, 3), ("axes fraction", "data"), "offset points", ha="right")
    for row in [row for row in rows if row not in free]:
        ours = row["row"].startswith("Full")
        colour = COLOURS[1] if ours else COLOURS[0] if row["row"].startswith("LoRA") else "grey"
        size, weight = (8, "bold") if ours else (6, "normal")
        axes.errorbar(
            row["bits"], row["accuracy"], row["spread"] or 0, fmt="o", color=colour, markersize=size, capsize=2
        )
        label = {"ha": "center", "weight": weight, "color": colour if colour != "grey" else "black"}
        above = -17 if row["row"].startswith(("Full at", "LoRA")) else 8  # names of neighbours must not meet
        name = row["row"].removeprefix("Full at ")
        axes.annotate(name, (row["bits"], row["accuracy"]), (0, above), textcoords="offset points", **label)
    axes.set(xscale="log", xlabel="bits per weight that a task adds", ylabel="mean accuracy, %", title=title)
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32]
    axes.set_xticks(ticks, ["¼", "½", *map(str, ticks[2:])])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.15, y=0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("docs/results/curve.svg"), help="the figure")
    parser.add_argument("--json", type=Path, default=POINTS, help="the points")
    given = parser.parse_args()
    rows = points(read(given.records, json.loads(POINTS.read_text()) if POINTS.exists() else []))
    if not rows:
        parser.error(f"no row in {', '.join(map(str, given.records))} has results and bits per weight")
    backbones = list(dict.fromkeys(row["backbone"] for row in rows))
    panels = [
        lambda axes, name=name: panel(axes, [r for r in rows if r["backbone"] == name], name) for name in backbones
    ]
    save(draw([panels], size=(6.4, 4.2)), given.output)
    write_atomically(given.json, (json.dumps(rows, indent=1) + "\n").encode())
    print(table(rows))


if __name__ == "__main__":
    main()

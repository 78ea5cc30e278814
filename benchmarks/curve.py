"""Mean accuracy over domains against bits per weight: `python -m benchmarks.curve runs/domains runs/bits`.

Each argument is a folder of `bitgraft bench domains` or `bitgraft bench bits`. Bits are those of the task files, head
apart, for each weight that `full` would mask. A row counts once it has every domain that all rows have; its bar is the
standard deviation over seeds. The points go into a JSON file and the figure; the table is printed.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bitgraft.backbone.files import write_atomically
from bitgraft.format.inspect import inspect_file
from bitgraft.paper.figures import COLOURS, draw, save
from bitgraft.store import Store

FEWEST = 0.02  # bits; below, the file is its head and a few numbers
Runs = dict[tuple[str, str], dict[int, dict[str, tuple[float, float]]]]
"""(backbone, row's title) -> seed -> domain -> (bits per weight, test accuracy in percent)."""


def read(folders: list[Path]) -> Runs:
    found: Runs = defaultdict(lambda: defaultdict(dict))
    for path in sorted(path for folder in folders for path in folder.glob("*/seed-*/runs/*/record.json")):
        record, store = json.loads(path.read_text()), Store(path.parents[2])
        bits = inspect_file(store.path(record["dataset"])).bits_per(store.size.weights)
        accuracy = 100 * record["selected"]["test_accuracy"]
        found[record["backbone"], record["title"]][record["seed"]][record["dataset"]] = bits, accuracy
    return found


def points(found: Runs) -> list[dict[str, Any]]:
    """One for each backbone and row: the mean over the domains that all its seeds have, if those are the usual ones."""
    common: dict[str, set[str]] = {}
    for (backbone, _), seeds in found.items():
        most = max(map(set, seeds.values()), key=len)
        common[backbone] = max(common.get(backbone, set()), most, key=len)
    rows = []
    for (backbone, title), seeds in found.items():
        whole = [seed for seed in seeds.values() if set(seed) >= common[backbone]]
        if whole:
            accuracies = [mean(seed[name][1] for name in common[backbone]) for seed in whole]
            bits = mean(seed[name][0] for seed in whole for name in common[backbone])
            spread = stdev(accuracies) if len(whole) > 1 else None
            rows.append({"backbone": backbone, "row": title, "bits": bits, "accuracy": mean(accuracies)})
            rows[-1] |= {"spread": spread, "seeds": len(whole), "domains": len(common[backbone])}
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
        above = -17 if row["row"].startswith("Full at") else 8  # names of neighbours must not meet
        axes.annotate(row["row"], (row["bits"], row["accuracy"]), (0, above), textcoords="offset points", **label)
    axes.set(xscale="log", xlabel="bits per weight that a task adds", ylabel="mean accuracy, %", title=title)
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32]
    axes.set_xticks(ticks, ["¼", "½", *map(str, ticks[2:])])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.15, y=0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("docs/results/curve.svg"), help="the figure")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/curve.json"))
    given = parser.parse_args()
    rows = points(read(given.runs))
    if not rows:
        parser.error(f"there is no finished run in {', '.join(map(str, given.runs))}")
    backbones = list(dict.fromkeys(row["backbone"] for row in rows))
    panels = [
        lambda axes, name=name: panel(axes, [r for r in rows if r["backbone"] == name], name) for name in backbones
    ]
    save(draw([panels], size=(6.4, 4.2)), given.output)
    write_atomically(given.json, (json.dumps(rows, indent=1) + "\n").encode())
    print(table(rows))


if __name__ == "__main__":
    main()

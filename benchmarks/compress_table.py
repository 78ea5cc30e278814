"""Compress fine-tuned copies to a few bits per weight, and measure the share of accuracy kept on five domains.

    python -m benchmarks.compress_table DATA runs/domains-grid/finetune-2e-3/seed-0     # about an hour of CPU time
    python -m benchmarks.compress_table --draw                                          # only redraw table and figure

DATA is the folder with decathlon-mini/ and sketches/; the second argument is a store of fine-tuned copies of
EfficientNet-Lite0 at 64 px from `bitgraft bench domains-grid --rows finetune-2e-3`. Each result is saved to the JSON
file at once and never repeated. The table is written to docs/results/compress.md, with the figure next to it.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.gathering import add, conclude, so_far
from bitgraft.compression.compress import DRAWINGS, compress
from bitgraft.compression.distil import CALIBRATION
from bitgraft.compression.source import values
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.format.summary import summarize
from bitgraft.network import Network
from bitgraft.paper.figures import draw, save
from bitgraft.store import Store
from bitgraft.task import Task
from bitgraft.training.evaluation import evaluate
from bitgraft.training.inputs import training_images

DOMAINS = {"flowers": "vgg-flowers", "gtsrb": "gtsrb", "dtd": "dtd", "omniglot": "omniglot", "sketches": None}
RESULTS, PAGE = Path("benchmarks/results/compress.json"), Path("docs/results/compress.md")
SIGNS = {"sign": "one sign and a scale per layer (BitDelta)", "sign-channel": "one sign and a scale per channel"}
BITS = (0.25, 0.5, 1.0, 2.0, 4.0)
CALIBRATED = "calibrated"
ROUNDED = "rounded"
TITLES = SIGNS | {f"{ROUNDED}-{bits:g}": f"`--bits {bits:g} --no-distil`" for bits in BITS}
TITLES |= {f"bits-{bits:g}": f"**`--bits {bits:g}`**" for bits in BITS}
TITLES |= {f"{CALIBRATED}-{bits:g}": f"`--bits {bits:g} --calibrate`" for bits in (0.5, 1.0)}
ROWS = tuple(TITLES)


def signed(net: Network, copy: Task, per_channel: bool) -> Task:
    """Return the copy with its weight change rounded to signs and a scale; the rest stays in float32."""
    task = net.add_task("made", copy.classes, "finetune", preset=None, preprocessing=copy.metadata.preprocessing)
    with torch.no_grad():
        for name, tensor in values(copy).items():
            if name in task.owned:
                task.owned[name].copy_(tensor)
        for name in net.anatomy.weights:
            ours = net.anatomy.tensor(name).detach()
            change = task.owned[name] - ours
            size = change.abs().flatten(1).mean(1).view(-1, *[1] * (change.dim() - 1))
            task.owned[name].copy_(ours + change.sign() * (size if per_channel else change.abs().mean()))
    return task


def measured(net: Network, copy: Task, row: str, data: str) -> dict[str, Any]:
    """Measure accuracy and size of one row for one copy."""
    splits = open_data(data, seed=0)
    assert splits.test is not None
    preprocessing = Preprocessing.from_dict(copy.metadata.preprocessing)
    begun, test = time.process_time(), ImageDataset(splits.test, preprocessing)
    if row in SIGNS:
        signed(net, copy, row == "sign-channel")
        bits = None
    else:
        kind, _, given = row.partition("-")
        images: Any = None if kind == ROUNDED else DRAWINGS
        if kind == CALIBRATED:
            images = training_images(splits.train, splits, preprocessing, CALIBRATION)
        made = compress(net, "made", copy, bits=float(given), calibrate_on=images)
        data = to_bytes(pack_task(made.task, "0" * 64))
        bits = summarize(memoryview(data), "the made task").bits_per_weight
    spent = time.process_time() - begun
    accuracy = evaluate(net, "made", test)["accuracy"]
    net.remove_task("made")
    return {"accuracy": accuracy, "bits": bits, "processor_seconds": round(spent, 1)}


def missing(rows: list[dict[str, Any]], domains: list[str], wanted: list[str]) -> Iterator[tuple[str, str]]:
    there = {(row["row"], row["domain"]) for row in rows}
    yield from ((row, name) for row in wanted for name in domains if (row, name) not in there)


def shares(results: dict[str, Any], row: str) -> list[float | None]:
    """Return the percentage of the copy's accuracy that a row keeps, by domain."""
    held = {found["domain"]: found for found in results["rows"] if found["row"] == row}
    return [
        100 * held[name]["accuracy"] / held[name]["finetuned"] if name in held else None for name in results["domains"]
    ]


def table(results: dict[str, Any]) -> str:
    copies = {found["domain"]: 100 * found["finetuned"] for found in results["rows"]}
    names = [name for name in results["domains"] if name in copies]
    lines = [f"| accuracy kept, % | {' | '.join(names)} | mean |", "|---|" + "--:|" * (len(names) + 1)]
    lines.append(f"| the copy's accuracy | {' | '.join(f'{copies[name]:.1f}' for name in names)} | |")
    for row in ROWS:
        kept = [share for share in shares(results, row) if share is not None]
        if len(kept) == len(names):
            lines.append(f"| {TITLES[row]} | {' | '.join(f'{s:.1f}' for s in kept)} | {mean(kept):.1f} |")
    return "\n".join([*lines, "", f"One seed; {results['machine']}, torch {results['torch']}, {results['date']}."])


def figure(results: dict[str, Any], path: Path) -> None:
    """Plot the mean accuracy kept against bits per weight, one line per way to compress."""

    def mean_kept(row: str) -> float | None:
        kept = [share for share in shares(results, row) if share is not None]
        return mean(kept) if len(kept) == len(results["domains"]) else None

    def panel(axes: Any) -> None:
        lines = {"bits": "distilled on drawings", CALIBRATED: "distilled on images", ROUNDED: "rounded"}
        for kind, label in lines.items():
            points = [(bits, found) for bits in BITS if (found := mean_kept(f"{kind}-{bits:g}")) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        for row, marker, label in zip(SIGNS, "x+", ("sign per layer (BitDelta)", "sign per channel"), strict=True):
            if (found := mean_kept(row)) is not None:
                axes.plot([1.0], [found], f"k{marker}", label=label)
        axes.set(xscale="log", xlabel="bits per weight, head apart", ylabel="accuracy kept, %")
        axes.set_xticks(BITS, [f"{bits:g}" for bits in BITS])
        axes.set_xticks([], minor=True)
        axes.legend(loc="lower right", fontsize="small")

    save(draw([[panel]], "Fine-tuned copies as tasks, mean of five domains"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", help="the folder with decathlon-mini/ and sketches/")
    parser.add_argument("copies", type=Path, nargs="?", help="a store of fine-tuned copies")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only redraw the table and the figure from --json")
    given = parser.parse_args()
    results = so_far(given.json, {"domains": given.domains}, parser)
    if not given.draw:
        if given.copies is None:
            parser.error("give the folders of the data and of the copies, or --draw")
        store = Store(given.copies)
        net = store.network()
        for row, name in missing(results["rows"], given.domains, given.rows):
            copy = net.tasks[name] if name in net.tasks else store.load(net, name)
            within = DOMAINS[name]
            data = f"{given.root}/decathlon-mini:{within}" if within else str(given.root / name)
            found = measured(net, copy, row, data) | {"finetuned": copy.metrics["test"]["accuracy"]}
            add(given.json, results, {"row": row, "domain": name, **found})
            print(f"{row}, {name}: {100 * found['accuracy']:.1f} of {100 * found['finetuned']:.1f} %", flush=True)
    usual = given.json == RESULTS
    figure(results, PAGE.with_suffix(".svg") if usual else given.json.with_suffix(".svg"))
    conclude(table(results), PAGE, "compress", usual)


if __name__ == "__main__":
    main()

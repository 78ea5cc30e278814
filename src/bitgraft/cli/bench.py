"""`bitgraft bench`: the runs of a suite."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from bitgraft.cli.options import AsJson, Pretrained, Root, Suite, Weights, Workers
from bitgraft.cli.output import FAILURE, show

if TYPE_CHECKING:
    from bitgraft.paper.bench.runner import Board

TRY = """
  bitgraft bench decathlon --root data --rows full,finetune --seeds 0,1,2 --runs runs/decathlon
  bitgraft bench my-suite.toml --root data --jobs 2
  bitgraft bench decathlon --root data --rows full --train-on-val --submission results.json
  bitgraft bench imagenet-to-sketch --plan"""
SUBMISSION = "Write the test answers of one row, in the challenge's format."


def bench(
    suite: Suite = "",
    root: Root = Path(),
    runs: Annotated[Path | None, Option(metavar="DIR", help="For task files and records [runs/SUITE].")] = None,
    rows: Annotated[str | None, Option("--rows", "--methods", metavar="A,B", help="Only these rows.")] = None,
    datasets: Annotated[str | None, Option(metavar="A,B", help="Only these data sets.")] = None,
    seeds: Annotated[str | None, Option(metavar="0,1,2", help="Instead of the suite's own.")] = None,
    backbone: Annotated[str | None, Option(metavar="NAME", help="Instead of the suite's own.")] = None,
    weights: Weights = None,
    pretrained: Pretrained = True,
    jobs: Annotated[int, Option(min=1, help="Runs at a time.")] = 1,
    threads: Annotated[int | None, Option(min=1, help="Per run [the cores divided by --jobs].")] = None,
    workers: Workers = 0,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="A Ray cluster; `local` starts one here.")] = None,
    train_on_val: Annotated[bool, Option("--train-on-val", help="Devkit domains: train on train and val.")] = False,
    submission: Annotated[Path | None, Option(metavar="FILE", help=SUBMISSION)] = None,
    plan: Annotated[bool, Option("--plan", help="List the runs that are left and exit.")] = False,
    known: Annotated[bool, Option("--list", help="List the built-in suites and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is left of a suite, with a record of each run.

    A suite is a grid: every row on every data set with every seed. A run with a record never runs again, so the same
    command goes on after a kill, and runs what was added. A run that fails does not hold up the others.
    """
    from bitgraft.paper.bench import reading, runner
    from bitgraft.paper.bench import suite as suites

    if known:
        held = {name: reading.load_suite(name) for name in reading.built_in()}
        data = {name: {"title": one.title, "rows": [row.row for row in one.rows]} for name, one in held.items()}
        lines = [f"{name:24}{s.title}: {len(s.datasets)} data sets, {len(s.rows)} rows" for name, s in held.items()]
        show(as_json, data, "\n".join(lines))
        return
    if not suite:
        raise typer.BadParameter(f"name a suite: one of {', '.join(reading.built_in())}, or a .toml file")
    whole = reading.load_suite(suite)
    if train_on_val:
        whole = suites.on_all_labels(whole)
    if backbone is not None or weights is not None or not pretrained:
        whole = suites.on_backbone(whole, backbone or whole.backbone.name, weights, pretrained)
    chosen = whole.chosen(_words(rows), _numbers(seeds), _words(datasets))
    parts = [whole.name, backbone or "", "train-on-val" if train_on_val else ""]
    folder = runs or Path("runs") / "-".join(filter(None, parts))
    if submission is not None and len(chosen.rows) != 1:
        raise typer.BadParameter("--submission is for one row: name it with --rows")
    if plan:
        board = runner.plan(chosen, folder)
        done, left = [str(cell) for cell in board.done], [str(cell) for cell in board.left]
        text = "\n  ".join([f"{len(done)} runs are done, {len(left)} are left", *left])
        show(as_json, {"done": done, "left": left}, text)
        return

    from rich.console import Console
    from rich.live import Live

    from bitgraft.paper.bench.pools import Local, Place, Ray
    from bitgraft.paper.bench.submission import write_submission

    place = Place(root, folder, threads or max(1, (os.cpu_count() or 1) // jobs), workers)
    pool = Local(jobs) if ray is None else Ray(None if ray == "local" else ray)
    runner.describe(whole, folder)
    console = Console(stderr=True, quiet=as_json)
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        board = runner.run(chosen, place, pool, _Progress(live, folder).changed)
    failed = {str(ended.cell): ended.fault for ended in board.failed}
    show(as_json, {"done": len(board.done), "failed": failed, "runs": str(folder)})
    for cell, fault in failed.items():
        typer.echo(f"error: {cell}: {fault}", err=True)
    if board.left:
        typer.echo(f"error: {len(board.left)} runs need the backbone, which could not be trained", err=True)
    if failed:
        raise typer.Exit(FAILURE)
    if submission is not None:
        count = write_submission(chosen, root, folder, submission)
        typer.echo(f"{count:,} answers in {submission}", err=True)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise typer.BadParameter(f"--seeds {text}: give whole numbers, as in --seeds 0,1,2") from None


class _Progress:
    """A live table in a terminal, else a line for each run."""

    def __init__(self, live: Any, folder: Path) -> None:
        self.live, self.folder = live, folder

    def changed(self, board: "Board") -> None:
        if self.live.console.is_terminal:
            self.live.update(table(board, self.folder), refresh=True)
        elif not self.live.console.quiet:
            ended = len(board.done) + len(board.failed)
            print(f"{ended} of {ended + len(board.left)} runs done, {len(board.failed)} failed", file=sys.stderr)


def table(board: "Board", folder: Path) -> Any:
    """Test accuracies so far: the mean over seeds, and how many of them are done."""
    from rich.table import Table

    from bitgraft.methods import registry
    from bitgraft.paper.bench.runner import records
    from bitgraft.paper.report.records import ORIGINAL

    suite = board.suite
    counts = f"{len(board.done)} runs done, {len(board.left)} left, {len(board.failed)} failed"
    drawn = Table("row", title=f"{suite.name}: {counts}")
    for dataset in suite.datasets:
        drawn.add_column(dataset.title or dataset.name, justify="right")
    found: dict[tuple[str, str], list[float]] = {}
    for record in records(suite, folder):
        found.setdefault((record["row"], record["dataset"]), []).append(record["last"]["test_accuracy"] or 0.0)
    for row in suite.rows:
        original = ORIGINAL if not registry.get(row.method).joint else ""  # a joint method has another backbone
        values = [found.get((row.row, d.name)) or found.get((original, d.name), []) for d in suite.datasets]
        means = [f"{100 * sum(v) / len(v):.1f}{f' ({len(v)})' if len(v) > 1 else ''}" if v else "·" for v in values]
        drawn.add_row(row.title or row.row, *means)
    return drawn

"""`bitgraft bench`: the runs of a suite, what is left of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitgraft.cli.names import AsJson, Workers

if TYPE_CHECKING:
    from bitgraft.paper.bench.pools import Pool
    from bitgraft.paper.bench.runner import Board
    from bitgraft.paper.bench.suite import Suite

TRY = """\b
Try:
  bitgraft bench decathlon --root data --rows full,finetune --seeds 0,1,2 --runs runs/decathlon
  bitgraft bench my-suite.toml --root data --jobs 2
  bitgraft bench decathlon --root data --rows full --train-on-val --submission results.json
  bitgraft bench imagenet-to-sketch --plan
  bitgraft report runs/decathlon"""


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="One of ours (--list), or a .toml file.")] = "",
    root: Annotated[Path, typer.Option(metavar="DIR", help="Where the data sets lie.")] = Path(),
    runs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where task files and records go [runs/SUITE].")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", "--methods", metavar="A,B", help="Only these rows of the table.")
    ] = None,
    datasets: Annotated[str | None, typer.Option(metavar="A,B", help="Only these data sets.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="In place of the suite's own.")] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="In place of the suite's own, as in --backbone densenet121.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Of the backbone: a file, or package:NAME.")
    ] = None,
    pretrained: Annotated[bool, typer.Option(help="Published weights where no others are given.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each run [the cores shared out].")] = None,
    workers: Workers = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster to run on; `local` starts one here.")
    ] = None,
    train_on_val: Annotated[
        bool, typer.Option("--train-on-val", help="Devkit domains: train on train and val.")
    ] = False,
    submission: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the test answers of one row, as the challenge takes them."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be run, and leave.")] = False,
    known: Annotated[bool, typer.Option("--list", help="Name the suites that come with bitgraft, and leave.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is left of a suite, with a record of each run.

    A suite is a grid: every row on every data set with every seed. What has its record is never run again, so the
    same command goes on after a kill, and runs what was added. A run that fails does not hold up the others.
    """
    from bitgraft.paper.bench import reading
    from bitgraft.paper.bench import suite as suites

    if known:
        _list(as_json)
        return
    if not suite:
        raise typer.BadParameter(f"say which suite: one of {', '.join(reading.built_in())}, or a .toml file")
    whole = reading.load_suite(suite)
    if train_on_val:
        whole = suites.on_all_labels(whole)
    if backbone is not None or weights is not None or not pretrained:
        whole = suites.on_backbone(whole, backbone or whole.backbone.name, weights, pretrained)
    chosen = whole.chosen(_words(rows), _numbers(seeds), _words(datasets))
    parts = [whole.name, backbone or "", "train-on-val" if train_on_val else ""]
    folder = runs or Path("runs") / "-".join(filter(None, parts))
    if submission is not None and len(chosen.rows) != 1:
        raise typer.BadParameter("--submission is of one row: name it with --rows")
    board = _run(whole, chosen, root, folder, jobs, threads, workers, ray, plan, as_json)
    if board is None:
        return
    if submission is not None and not board.failed:
        from bitgraft.paper.bench.submission import write_submission

        count = write_submission(chosen, root, folder, submission)
        typer.echo(f"{count:,} answers in {submission}", err=True)
    if board.failed:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from bitgraft.cli.output import show_json
    from bitgraft.paper.bench.reading import built_in, load_suite

    known = {name: load_suite(name) for name in built_in()}
    if as_json:
        show_json({name: {"title": s.title, "rows": [r.row for r in s.rows]} for name, s in known.items()})
    else:
        for name, held in known.items():
            typer.echo(f"{name:24}{held.title}: {len(held.datasets)} data sets, {len(held.rows)} rows")


def _run(
    whole: "Suite",
    chosen: "Suite",
    root: Path,
    folder: Path,
    jobs: int,
    threads: int | None,
    workers: int,
    ray: str | None,
    plan: bool,
    as_json: bool,
) -> "Board | None":
    import os

    from bitgraft.cli.board import Progress
    from bitgraft.cli.output import show_json
    from bitgraft.paper.bench import runner
    from bitgraft.paper.bench.pools import Place

    if plan:
        _plan(runner.plan(chosen, folder), as_json)
        return None
    place = Place(root, folder, threads or max(1, (os.cpu_count() or 1) // jobs), workers)
    pool = _pool(jobs, ray)
    runner.describe(whole, folder)
    with Progress(folder, quiet=as_json) as progress:
        board = runner.run(chosen, place, pool, progress.changed)
    if as_json:
        show_json(
            {"done": len(board.done), "failed": {str(e.cell): e.fault for e in board.failed}, "runs": str(folder)}
        )
    for ended in board.failed:
        typer.echo(f"error: {ended.cell}: {ended.fault}", err=True)
    if board.left:
        typer.echo(f"error: {len(board.left)} runs wait for the backbone, which was not trained", err=True)
    return board


def _pool(jobs: int, ray: str | None) -> "Pool":
    from bitgraft.paper.bench.pools import Local, Ray

    return Local(jobs) if ray is None else Ray(None if ray == "local" else ray)


def _plan(board: "Board", as_json: bool) -> None:
    from bitgraft.cli.output import show_json

    if as_json:
        show_json({"done": [str(cell) for cell in board.done], "left": [str(cell) for cell in board.left]})
        return
    typer.echo(f"{len(board.done)} runs are done, {len(board.left)} are left")
    for cell in board.left:
        typer.echo(f"  {cell}")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise typer.BadParameter(f"--seeds {text}: give whole numbers, as in --seeds 0,1,2") from None

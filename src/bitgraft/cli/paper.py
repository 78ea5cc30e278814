"""`bitgraft demo`, `bench`, `report`, `score` and `data`: benchmarks and their reports."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.app import app, command, count, flag, setting
from bitgraft.cli.options import AsJson, Pretrained, Root, Suite, Weights, Workers
from bitgraft.cli.output import FAILURE, console, show, table
from bitgraft.errors import SuiteError, TrainingError
from bitgraft.training.config import Config

BASELINE = "The baseline of the score S [the suite's row, or the challenge's]."
SUBMISSION = "Write the test predictions of one row in the challenge's format."
data_app = typer.Typer(rich_markup_mode=None)
app.add_typer(data_app, name="data")


@command("""
  bitgraft demo
  bitgraft demo --folder my-demo""")
def demo(
    folder: Annotated[str, setting("DIR", "Where to write the store and report.html; replaced on each run.")] = "demo",
) -> None:
    """Add two tasks to a pretrained network, and compare five methods.

    Takes less than five minutes on two idle cores and writes a page, report.html. First run `pip install '.[demo]'` in
    a clone of bitgraft.
    """
    from bitgraft.paper.demo import run

    run(Path(folder), console(sys.stdout))


@command("""
  bitgraft bench decathlon --root data --rows full,finetune --seeds 0,1,2 --runs runs/decathlon
  bitgraft bench my-suite.toml --root data --jobs 2
  bitgraft bench decathlon --root data --rows full --train-on-val --submission results.json
  bitgraft bench imagenet-to-sketch --plan""")
def bench(
    suite: Suite = "",
    root: Root = Path(),
    runs: Annotated[Path | None, setting("DIR", "Where to write task files and records [runs/SUITE].")] = None,
    records: Annotated[Path | None, setting("FILE", "Records of an earlier report, whose runs are skipped.")] = None,
    rows: Annotated[str | None, Option("--rows", "--methods", metavar="A,B", help="Only these rows.")] = None,
    datasets: Annotated[str | None, setting("A,B", "Only these data sets.")] = None,
    seeds: Annotated[str | None, setting("0,1,2", "Seeds [the suite's].")] = None,
    backbone: Annotated[str | None, setting("NAME", "The backbone [the suite's].")] = None,
    weights: Weights = None,
    pretrained: Pretrained = True,
    jobs: Annotated[int, count("Runs in parallel.")] = 1,
    threads: Annotated[int | None, count("Threads per run [cores / --jobs].")] = None,
    workers: Workers = 0,
    train_on_val: Annotated[bool, flag("--train-on-val", "Train on train and val (devkit domains).")] = False,
    submission: Annotated[Path | None, setting("FILE", SUBMISSION)] = None,
    plan: Annotated[bool, flag("--plan", "List the remaining runs and exit.")] = False,
    list_suites: Annotated[bool, flag("--list", "List the built-in suites and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the remaining runs of a benchmark suite.

    A suite is a grid: every row on every data set with every seed. Each run leaves a record and is never repeated, so
    the same command continues after a kill and runs what was added. A failed run does not stop the others.
    """
    from bitgraft.paper.bench import reading

    if list_suites:
        found = reading.contents()
        data = {n: {"title": s["title"], "rows": [row["row"] for row in s["rows"]]} for n, s in found.items()}
        listed = [(n, s["title"], len(s["datasets"]), len(s["rows"])) for n, s in found.items()]
        show(as_json, data, table(["suite", "title", "data sets>", "rows>"], listed))
        return
    if not suite:
        raise typer.BadParameter(f"name a suite: one of {', '.join(reading.built_in())}, or a .toml file")

    from bitgraft.paper.bench import runner
    from bitgraft.paper.bench import suite as suites

    try:
        whole = reading.load_suite(suite)
        if train_on_val:
            whole = suites.on_all_labels(whole)
        if backbone is not None or weights is not None or not pretrained:
            whole = suites.on_backbone(whole, backbone or whole.backbone.name, weights, pretrained)
        chosen = whole.chosen(_words(rows), _seeds(seeds), _words(datasets))
    except SuiteError as error:
        raise typer.BadParameter(str(error)) from error
    parts = [whole.name, backbone or "", "train-on-val" if train_on_val else ""]
    folder = runs or Path("runs") / "-".join(filter(None, parts))
    if submission is not None and len(chosen.rows) != 1:
        raise typer.BadParameter("--submission takes one row: name it with --rows")
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"--runs {folder}: this is a file, not a folder")
    if records is not None:
        runner.adopt(records, folder)
    if plan:
        board = runner.plan(chosen, folder)
        done, left = [str(cell) for cell in board.done], [str(cell) for cell in board.left]
        text = "\n  ".join([f"{len(done)} runs are done, {len(left)} are left", *left])
        show(as_json, {"done": done, "left": left}, text)
        return

    from bitgraft.paper.bench.submission import write_submission

    if not root.is_dir():
        raise typer.BadParameter(f"--root {root}: there is no such folder")
    place = runner.Place(root, folder, threads or max(1, (os.cpu_count() or 1) // jobs), workers)
    runner.describe(whole, folder)

    def tell(board: runner.Board) -> None:
        ended = len(board.done) + len(board.failed)
        typer.echo(f"{ended} of {ended + len(board.left)} runs done, {len(board.failed)} failed", err=True)

    board = runner.run(chosen, place, jobs, (lambda board: None) if as_json else tell)
    failed = {str(cell): fault for cell, fault in board.failed.items()}
    show(as_json, {"done": len(board.done), "failed": failed, "runs": str(folder)})
    for cell, fault in failed.items():
        typer.echo(f"error: {cell}: {fault}", err=True)
    if board.left:
        typer.echo(f"error: {len(board.left)} runs need the backbone, whose training failed", err=True)
    if failed:
        raise typer.Exit(FAILURE)
    if submission is not None:
        count = write_submission(chosen, root, folder, submission)
        typer.echo(f"wrote {count:,} predictions to {submission}", err=True)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _seeds(text: str | None) -> list[int]:
    try:
        return [Config(seed=int(word)).seed for word in _words(text)]
    except TrainingError as error:
        raise typer.BadParameter(f"--seeds: {error}") from error
    except ValueError:
        raise typer.BadParameter(f"--seeds {text}: give whole numbers separated by commas, such as 0,1,2") from None


@command("""
  bitgraft report runs/decathlon --published --output docs/results/decathlon
  bitgraft report docs/results/decathlon/records.jsonl --baseline finetune --output other
  bitgraft report runs/quick-grid --validation --json""")
def report(
    runs: Annotated[Path, Argument(metavar="RUNS", help="A folder with records at any depth, or a records.jsonl.")],
    out: Annotated[Path | None, Option("--output", "--out", metavar="DIR", help="Output folder [RUNS/report].")] = None,
    published: Annotated[bool, flag("--published", "Add the paper's rows.")] = False,
    selected: Annotated[bool, flag("--selected", "Use the best epoch on validation, not the last.")] = False,
    validation: Annotated[bool, flag("--validation", "Show validation accuracies, for choosing settings.")] = False,
    baseline: Annotated[str | None, setting("ROW|FILE", BASELINE)] = None,
    as_json: AsJson = False,
) -> None:
    """Write a benchmark's tables and figures.

    The tables (accuracy and size, decathlon scores, cost, ablation) are in Markdown, LaTeX and HTML, the figures in
    PNG. All records go into one file, records.jsonl, which this command can also read. The best method on each data set
    is bold, the second best underlined.
    """
    from bitgraft.paper.report.render import markdown
    from bitgraft.paper.report.write import usual_place, write_report

    if validation and published:
        raise typer.BadParameter(
            "give either --validation or --published, not both: the paper has test accuracies only"
        )
    what: dict[str, Any] = {"published": published, "selected": selected, "validation": validation}
    written = write_report(runs, out or usual_place(runs), baseline=baseline, **what)
    files = [str(file) for file in written.files]
    data = {"files": files, "tables": [table.plain() for table in written.tables]}
    show(as_json, data, *map(markdown, written.tables), "\n  ".join(["Wrote:", *files]))
    if not written.drawn:
        typer.echo("no figures: matplotlib is not installed; run pip install matplotlib", err=True)


@command("""
  bitgraft score results.json --annotations decathlon/annotations
  bitgraft score results.json --annotations decathlon/annotations --baseline mine.toml""")
def score(
    file: Annotated[Path, Argument(metavar="FILE", help="The submission (JSON).")],
    annotations: Annotated[Path, setting("DIR", "The folder of <domain>_test.json files with labels.")],
    baseline: Annotated[Path | None, setting("FILE", "Baseline errors (TOML) [the challenge's].")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a submission to the Visual Decathlon.

    Prints the accuracy and the score S of each domain and overall. S is 250 for the baseline and 1000 without errors.
    """
    from bitgraft.paper import scores

    baselines = scores.challenge_baselines() if baseline is None else scores.read_baselines(baseline)
    scored = scores.score_submission(scores.read_submission(file), scores.read_labels(annotations), baselines)
    fields = {"baseline_error": "baseline"} | {n: n for n in ("domain", "images", "correct", "accuracy", "score")}
    data = {
        "domains": [{key: getattr(one, field) for key, field in fields.items()} for one in scored.domains],
        "mean_accuracy": scored.accuracy,
        "score": scored.total,
        "absent": list(scored.absent),
        "baselines": baselines.source,
    }
    rows = [
        (d.domain, d.images, d.correct, f"{100 * d.accuracy:.2f}", f"{100 - d.baseline:.2f}", f"{d.score:.1f}")
        for d in scored.domains
    ]
    images, correct = (sum(getattr(one, part) for one in scored.domains) for part in ("images", "correct"))
    rows.append(("all", images, correct, f"{100 * scored.accuracy:.2f}", "", f"{scored.total:.1f}"))
    note = f"Accuracy in per cent; the last row is the mean over domains. Baselines: {baselines.source}."
    if scored.absent:
        note += f"\nThe total S is over {len(scored.domains)} domains; missing: {', '.join(scored.absent)}."
    show(as_json, data, table(["domain", "images>", "right>", "accuracy>", "baseline>", "S>"], rows), note)


@data_app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Check the data sets of a suite."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@command(
    """
  bitgraft data check decathlon --root data
  bitgraft data check my-suite.toml --root data --json""",
    to=data_app,
)
def check(suite: Suite, root: Root = Path(), as_json: AsJson = False) -> None:
    """Check the images, classes and checksums of a suite's data sets.

    For a data set that is missing or different, prints the fault, its source and the files that are read; the exit code
    is then 1.
    """
    from bitgraft.paper.bench import reading
    from bitgraft.paper.bench.check import layout, problems, unchecked

    report, lines = {}, []
    try:
        held = reading.load_suite(suite)
    except SuiteError as error:
        raise typer.BadParameter(str(error)) from error
    for dataset in held.datasets:
        name, faults = dataset.name, list(problems(dataset, root))
        gone, read = unchecked(dataset, root), layout(dataset)
        about = {"faults": faults, "layout": read, "source": dataset.source, "unchecked": gone}
        report[name] = {"ready": not faults, **about}
        said = ["ready" + (f"; missing, so not checked: {', '.join(gone)}" if gone else "")]
        if faults:
            said = [*faults, *([f"source: {dataset.source}"] if dataset.source else []), f"files: {read}"]
        lines += [f"{'' if number else name:16}{line}" for number, line in enumerate(said)]
    show(as_json, report, "\n".join(lines))
    if not all(one["ready"] for one in report.values()):
        raise typer.Exit(FAILURE)

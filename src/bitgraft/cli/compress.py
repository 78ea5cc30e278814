"""`bitgraft compress`: a fine-tuned copy of the network becomes a task of few bits per weight."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command
from bitgraft.cli.output import megabytes, percent, show
from bitgraft.training.callbacks import Callback, Plan

FINETUNED = "A file of plain weights, a task file, or STORE/TASK."
BACKBONE = "What was fine-tuned, named as for `bitgraft train`; once per store."
CLASSES = "One name per line, or rose,tulip,...; in the order of the outputs."
BITS = "What the file takes for each weight, head apart: 0.25 to 4."
CALIBRATE = "Train weights and norm layers to give the copy's scores, and measure accuracy."
RATE = "Rates of calibration: scores, norms; repeatable."


@command("""
  bitgraft compress finetuned.safetensors --backbone resnet50 --task flowers
  bitgraft compress finetuned.pth --task flowers --classes names.txt --eval photos
  bitgraft compress other-store/flowers --task flowers --bits 2
  bitgraft compress finetuned.pth --task flowers --calibrate photos --bits 0.5""")
def compress(
    finetuned: Annotated[str, Argument(metavar="FINETUNED", help=FINETUNED, show_default=False)],
    task: Annotated[str, Option(metavar="NAME", help="What to call the task.")],
    backbone: Annotated[str | None, Option(metavar="NAME", help=BACKBONE)] = None,
    weights: opt.Weights = None,
    pretrained: opt.Pretrained = True,
    store: opt.StoreFolder = opt.STORE,
    classes: Annotated[str | None, Option(metavar="FILE|NAMES", help=CLASSES)] = None,
    evaluate: Annotated[str | None, Option("--eval", metavar="DATA", help="Measure accuracy before and after.")] = None,
    calibrate: Annotated[str | None, Option(metavar="DATA", help=CALIBRATE)] = None,
    bits: Annotated[float, Option(min=0.25, max=4.0, help=BITS)] = 1.0,
    steps: Annotated[int | None, Option(min=1, help="Of calibration.")] = None,
    batch: opt.Batch = None,
    rate: Annotated[list[str] | None, Option(metavar="[ROLE=]VALUE", help=RATE)] = None,
    seed: opt.Seed = None,
    size: opt.Size = None,
    resize: opt.Resize = None,
    option: opt.MethodOptions = None,
    overwrite: opt.Overwrite = False,
    workers: opt.Workers = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Make a task from a fine-tuned copy of the network, without its data.

    Weights change by whole steps, most of them none, as many as the bits allow; biases make up for what that does to
    the mean of each channel; the head is the copy's own. With --calibrate weights and norm layers are refined on
    images, whose labels serve only to measure.
    """
    if evaluate is not None and calibrate is not None:
        raise typer.BadParameter("--calibrate also measures accuracy: leave out --eval")
    if calibrate is None and (steps or batch or rate):
        raise typer.BadParameter("--steps, --batch and --rate are for calibration: add --calibrate DATA")
    options, rates = opt.method_options("full", option), opt.by_role(rate, "--rate")

    from bitgraft.compression.distil import CALIBRATION
    from bitgraft.format.inspect import inspect_file
    from bitgraft.workflows.compress_task import Job, run

    changes = {"steps": steps, "batch": batch, "seed": seed, "size": size, "resize": resize}
    given = {name: value for name, value in changes.items() if value is not None}
    job = Job(
        finetuned,
        task,
        classes=_names(classes),
        data=calibrate or evaluate,
        calibrate=calibrate is not None,
        bits=bits,
        config=CALIBRATION.changed(**given, rates=rates),
        options=options,
        workers=workers,
        overwrite=overwrite,
    )
    chosen = opt.asked_backbone(store, backbone, weights, pretrained, "name what was fine-tuned with --backbone")
    done = run(store, chosen, job, callbacks=[] if as_json else [_Distance()])
    found, made = inspect_file(done.path), done.made
    report = {
        "task": task,
        "file": str(done.path),
        "classes": list(made.task.classes or ()),
        "bytes": found.size,
        "bytes_by_kind": found.bytes,
        "finetuned_bytes": done.finetuned_bytes,
        "weights": found.weights,
        "bits_per_weight": found.bits_per_weight,
        "kept": made.kept,
        "cosine": made.cosine,
        "measured_on": done.measured_on,
        "accuracy": made.accuracy,
        "history": made.history,
        "notes": done.notes,
    }
    show(as_json, report, "\n".join(_lines(report)))


def _names(given: str | None) -> list[str] | None:
    """The names in a file, one per line, or between commas."""
    if given is None:
        return None
    names = Path(given).read_text(encoding="utf-8").splitlines() if Path(given).is_file() else given.split(",")
    return [name.strip() for name in names if name.strip()]


class _Distance(Callback):
    """How far the task's scores are from the copy's, a line for each epoch."""

    def begin(self, plan: Plan) -> None:
        self.epochs = plan.epochs

    def epoch(self, record: dict[str, Any]) -> None:
        print(f"epoch {record['epoch']}/{self.epochs}  distance {record['train_loss']:.4f}", flush=True)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in report["notes"]]
    lines.append(f"{percent(report['kept'])} of what fine-tuning changed in {report['weights']:,} weights is kept")
    if report["accuracy"]:
        shares = ", ".join(f"{what} {percent(share)}" for what, share in report["accuracy"].items())
        lines.append(f"{report['measured_on']} accuracy: {shares}")
    lines.append(
        f"wrote {report['file']}, {megabytes(report['bytes'])}: 1/{report['finetuned_bytes'] / report['bytes']:.0f} of "
        f"the copy's {megabytes(report['finetuned_bytes'])}; {report['bits_per_weight']:.2f} bits a weight, head apart"
    )
    return lines

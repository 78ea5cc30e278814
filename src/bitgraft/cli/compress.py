"""`bitgraft compress`: turn a fine-tuned copy of the backbone into a task of a few bits per weight."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command, count, flag, number, setting
from bitgraft.cli.output import megabytes, percent, show
from bitgraft.store import Store
from bitgraft.training.callbacks import Callback, Plan

FINETUNED = "The fine-tuned copy: a file of weights, a task file, or STORE/TASK."
BACKBONE = "The network that was fine-tuned, as for `bitgraft train`; only for a new store."
CLASSES = "Class names in the order of the outputs: a file with one per line, or rose,tulip,..."
BITS = "File size in bits per weight, without the head."
CALIBRATE = "Distil on these images instead of drawings, and measure accuracy."
ROUND = "Only round the weights: seconds instead of minutes, less accurate at one bit."
RATE = "Learning rate of distillation, for the roles scores and norms; repeatable."


@command("""
  bitgraft compress finetuned.safetensors --backbone resnet50 --task flowers
  bitgraft compress finetuned.pth --task flowers --classes names.txt --eval photos
  bitgraft compress other-store/flowers --task flowers --bits 2
  bitgraft compress finetuned.pth --task flowers --calibrate photos --bits 0.5
  bitgraft compress finetuned.pth --task flowers --no-distil""")
def compress(
    context: typer.Context,
    finetuned: Annotated[str, Argument(metavar="FINETUNED", help=FINETUNED, show_default=False)],
    task: Annotated[str, setting("NAME", "The new task's name.")],
    backbone: Annotated[str | None, setting("NAME", BACKBONE)] = None,
    weights: opt.Weights = None,
    pretrained: opt.Pretrained = True,
    store: opt.StoreFolder = opt.STORE,
    classes: Annotated[str | None, setting("FILE|NAMES", CLASSES)] = None,
    evaluate: Annotated[str | None, Option("--eval", metavar="DATA", help="Measure accuracy before and after.")] = None,
    calibrate: Annotated[str | None, setting("DATA", CALIBRATE)] = None,
    no_distil: Annotated[bool, flag("--no-distil", ROUND)] = False,
    bits: Annotated[float, number(BITS, 0.25, 4.0)] = 1.0,
    steps: Annotated[int | None, count("Steps of distillation.")] = None,
    batch: opt.Batch = None,
    rate: Annotated[list[str] | None, setting("[ROLE=]VALUE", RATE)] = None,
    seed: opt.Seed = None,
    size: opt.Size = None,
    resize: opt.Resize = None,
    option: opt.MethodOptions = None,
    overwrite: opt.Overwrite = False,
    workers: opt.Workers = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Turn a fine-tuned copy of the backbone into a task.

    Needs no data. The change of each weight is rounded to whole steps, mostly 0, to fit the bits, and biases correct
    the mean of each channel. The head is the copy's. Weights and norm layers are then trained to match the copy's
    scores, on random drawings or, more accurately, on the images of --calibrate, whose labels only measure accuracy.
    """
    if evaluate is not None and calibrate is not None:
        raise typer.BadParameter("--calibrate also measures accuracy: leave out --eval")
    if no_distil and (calibrate or steps or batch or rate):
        raise typer.BadParameter("--no-distil only rounds: leave out --calibrate, --steps, --batch and --rate")
    options = opt.method_options("full", option)

    from bitgraft.compression.distil import CALIBRATION, ON_DRAWINGS
    from bitgraft.format.inspect import inspect_file
    from bitgraft.workflows.compress_task import compress_into

    chosen = opt.requested_backbone(store, backbone, weights, pretrained, "name the fine-tuned network with --backbone")
    made, measured_on = compress_into(
        store,
        chosen,
        finetuned,
        task,
        classes=_names(classes),
        data=calibrate or evaluate,
        distil_on="data" if calibrate else None if no_distil else "drawings",
        bits=bits,
        config=opt.changed(CALIBRATION if calibrate else ON_DRAWINGS, context.params),
        options=options,
        workers=workers,
        overwrite=overwrite,
        callbacks=[] if as_json else [_Distance()],
    )
    path = Store(store).path(task)
    found = inspect_file(path)
    report = {
        "task": task,
        "file": str(path),
        "classes": list(made.task.classes or ()),
        "bytes": found.size,
        "bytes_by_kind": found.bytes,
        "finetuned_bytes": Store(store).size.copy_bytes(found.bytes["head"]),
        "weights": found.weights,
        "bits_per_weight": found.bits_per_weight,
        "kept": made.kept,
        "cosine": made.cosine,
        "measured_on": measured_on,
        "accuracy": made.accuracy,
        "history": made.history,
        "notes": made.warnings,
    }
    show(as_json, report, "\n".join(_lines(report)))


def _names(given: str | None) -> list[str] | None:
    """Read class names from a file, one per line, or from text, separated by commas."""
    if given is None:
        return None
    try:
        names = Path(given).read_text(encoding="utf-8").splitlines() if Path(given).is_file() else given.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--classes {given} cannot be read as text: {error}") from error
    return [name.strip() for name in names if name.strip()]


class _Distance(Callback):
    """Prints the distance between the task's and the copy's scores after each epoch."""

    def begin(self, plan: Plan) -> None:
        self.epochs = plan.epochs

    def epoch(self, record: dict[str, Any]) -> None:
        print(f"epoch {record['epoch']}/{self.epochs}  distance {record['train_loss']:.4f}", flush=True)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in report["notes"]]
    lines.append(f"kept {percent(report['kept'])} of the change by fine-tuning in {report['weights']:,} weights")
    if report["accuracy"]:
        shares = ", ".join(f"{what} {percent(share)}" for what, share in report["accuracy"].items())
        lines.append(f"{report['measured_on']} accuracy: {shares}")
    ratio = f"1/{report['finetuned_bytes'] / report['bytes']:.0f}"
    lines.append(
        f"wrote {report['file']}, {megabytes(report['bytes'])}, {ratio} of the copy's "
        f"{megabytes(report['finetuned_bytes'])}: {report['bits_per_weight']:.2f} bits per weight without the head"
    )
    return lines

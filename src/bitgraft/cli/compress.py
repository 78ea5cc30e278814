"""`bitgraft compress`: a fine-tuned copy of the network becomes a task of about one bit per weight."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.names import STORE, AsJson, Pretrained, StoreFolder, Weights, Workers, asked_backbone
from bitgraft.cli.output import megabytes, show, show_json
from bitgraft.cli.settings import by_role, method_options
from bitgraft.training.callbacks import Callback

if TYPE_CHECKING:
    from bitgraft.training.config import Config
    from bitgraft.workflows.compress_task import CompressResult

TRY = """\b
Try:
  bitgraft compress finetuned.safetensors --backbone resnet50 --task flowers
  bitgraft compress finetuned.pth --task flowers --classes names.txt --eval photos
  bitgraft compress other-store/flowers --task flowers --option per=channel
  bitgraft compress finetuned.pth --task flowers --calibrate photos --masks"""


def compress(
    finetuned: Annotated[
        str,
        typer.Argument(
            metavar="FINETUNED", help="A file of plain weights, a task file, or STORE/TASK.", show_default=False
        ),
    ],
    task: Annotated[str, typer.Option(metavar="NAME", help="What to call the task.")],
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What it was fine-tuned from; named as for `bitgraft train`, once per store."
        ),
    ] = None,
    weights: Weights = None,
    pretrained: Pretrained = True,
    store: StoreFolder = STORE,
    classes: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAMES", help="A name per line, or rose,tulip,...; in the order of its outputs."),
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option("--eval", metavar="DATA", help="Measure accuracy before and after.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Train k and norm layers to give the copy's scores, and measure."),
    ] = None,
    masks: Annotated[bool, typer.Option("--masks", help="With --calibrate: train the masks, too.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Of calibration.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.")] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(metavar="[ROLE=]VALUE", help="Rates of calibration: scores, k, k1, norms; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is random.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels of a square input [the backbone's own].")] = None,
    resize: Annotated[int | None, typer.Option(min=1, help="Pixels of the shorter side before the crop.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of method full, as in per=channel; repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Even if the task is there.")] = False,
    workers: Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Make a task of method full from a fine-tuned copy of the network, without its data.

    Masks and k are the nearest to the copy's weights by least squares; norm layers and the head are the copy's own.
    With --calibrate they are refined on images, whose labels serve only to measure.
    """
    if evaluate is not None and calibrate is not None:
        raise typer.BadParameter("--calibrate measures, too: leave out --eval")
    if calibrate is None and (masks or steps or batch or rate):
        raise typer.BadParameter("--masks, --steps, --batch and --rate are for calibration: add --calibrate DATA")
    options = method_options("full", option)
    config = _config({"steps": steps, "batch": batch, "seed": seed, "size": size, "resize": resize}, rate)

    from bitgraft.workflows.compress_task import Job, run

    job = Job(
        finetuned,
        task,
        _names(classes),
        calibrate or evaluate,
        calibrate is not None,
        masks,
        config,
        options,
        workers,
        overwrite,
    )
    chosen = asked_backbone(store, backbone, weights, pretrained, "say with --backbone what was fine-tuned")
    done = run(store, chosen, job, callbacks=[_Distance(quiet=as_json)])
    report = _report(done)
    show_json(report) if as_json else _show(report)


def _config(changes: dict[str, Any], rate: list[str] | None) -> "Config":
    from bitgraft.compression.distil import CALIBRATION

    given = {name: value for name, value in changes.items() if value is not None}
    return CALIBRATION.changed(**given, rates=by_role(rate, "--rate") or {})


def _names(given: str | None) -> list[str] | None:
    """The names in a file, one per line, or between commas."""
    import os

    if given is None:
        return None
    if not os.path.isfile(given):
        return [name.strip() for name in given.split(",")]
    with open(given, encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


class _Distance(Callback):
    """How far the task's answers are from the copy's, a line for each epoch."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.epochs = quiet, 0

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self.epochs = epochs

    def epoch(self, record: dict[str, Any]) -> None:
        if not self.quiet:
            print(f"epoch {record['epoch']}/{self.epochs}  distance {record['train_loss']:.4f}", flush=True)


def _report(done: "CompressResult") -> dict[str, Any]:
    from bitgraft.format.inspect import inspect_file

    found = inspect_file(done.path)
    return {
        "task": done.made.task.name,
        "file": str(done.path),
        "classes": list(done.made.task.classes or ()),
        "bytes": found.size,
        "bytes_by_kind": found.bytes,
        "finetuned_bytes": done.finetuned_bytes,
        "weights": found.weights,
        "kept": done.made.kept,
        "cosine": done.made.cosine,
        "measured_on": done.measured_on,
        "accuracy": done.made.accuracy,
        "history": done.made.history,
        "notes": done.notes,
    }


def _show(report: dict[str, Any]) -> None:
    masked = report["bytes_by_kind"]["masks"] + report["bytes_by_kind"]["k"]
    lines = [f"note: {note}" for note in report["notes"]]
    lines.append(f"{100 * report['kept']:.1f} % of what fine-tuning changed in {report['weights']:,} weights is kept")
    if report["accuracy"]:
        shares = ", ".join(f"{what} {100 * share:.1f} %" for what, share in report["accuracy"].items())
        lines.append(f"{report['measured_on']} accuracy: {shares}")
    lines.append(
        f"wrote {report['file']}, {megabytes(report['bytes'])}: 1/{report['finetuned_bytes'] / report['bytes']:.0f} of "
        f"the copy's {megabytes(report['finetuned_bytes'])} (its masks and k 1/{4 * report['weights'] / masked:.0f})"
    )
    show("\n".join(lines))

"""`bitgraft train`: from a folder of images to a task file."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.names import STORE, AsJson, Pretrained, StoreFolder, Weights, Workers, asked_backbone
from bitgraft.cli.settings import ClassWeights, Keep, Precision, Schedule, by_role, method_options, plain, settled, toml

if TYPE_CHECKING:
    from bitgraft.training.config import Config

TRY = """\b
Try:
  bitgraft train photos --task flowers --backbone resnet50
  bitgraft train photos --task flowers --size 64 --epochs 3 --rate k=3e-3
  bitgraft train decathlon-1.0:gtsrb --task signs --preset decathlon --no-flip
  bitgraft train photos --task flowers --resume
  bitgraft train few-photos --task orchids --borrow flowers --borrow leaves
  bitgraft train photos signs --task flowers --task signs --method adapters-joint --backbone resnet50 --store joint
  bitgraft train --preset imagenet-to-sketch --weight-decay 1e-4 --show-config"""

DATA = """FOLDER with train/ val/ test/ or class folders alone; DEVKIT:DOMAIN; torchvision:NAME; package:NAME."""
SET = "Settings, in place of the preset's"


def train(
    data: Annotated[list[str] | None, typer.Argument(metavar="DATA", help=DATA, show_default=False)] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What to call the task; once for each DATA. Required.")
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="timm's name, wrn-DEPTH-WIDTH, or package.module:function; once per store."),
    ] = None,
    weights: Weights = None,
    pretrained: Pretrained = True,
    store: StoreFolder = STORE,
    method: Annotated[str, typer.Option(metavar="NAME", help="See `bitgraft methods`.")] = "full",
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the method, as in k1=0; repeatable.")
    ] = None,
    borrow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Mix in this task's masks, which are needed from then on; repeatable."),
    ] = None,
    start: Annotated[str | None, typer.Option(metavar="NAME", help="Begin as this task of the store is.")] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help="quick, imagenet-to-sketch or decathlon.")] = "quick",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step, over all processes.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels of a square input [the backbone's own].")] = None,
    resize: Annotated[int | None, typer.Option(min=1, help="Pixels of the shorter side before the crop.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is random.")] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE=]VALUE", help="Learning rate; roles: scores, k, k1, weights, norms, head; repeatable."
        ),
    ] = None,
    weight_decay: Annotated[list[str] | None, typer.Option(metavar="[ROLE=]VALUE", help="By role; repeatable.")] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="How rates fall.")] = None,
    drop_after: Annotated[int | None, typer.Option(min=1, help="Epochs until the step schedule divides by 10.")] = None,
    warmup: Annotated[float | None, typer.Option(min=0.0, help="Epochs over which rates rise.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of the targets.")] = None,
    patience: Annotated[int | None, typer.Option(min=1, help="Stop after so many epochs without a better one.")] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Run each batch in so many parts.")] = None,
    class_weights: Annotated[ClassWeights | None, typer.Option(help="Rare classes count as much as others.")] = None,
    keep: Annotated[Keep | None, typer.Option(help="Which epoch the task ends as.")] = None,
    flip: Annotated[bool | None, typer.Option("--flip/--no-flip", help="Mirror images [as the data allow].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train a task of that name anew.")] = False,
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Leave out files that cannot be read, and list them.")
    ] = False,
    workers: Workers = 0,
    mixed_precision: Annotated[Precision, typer.Option(help="Of the computation; tasks stay float32.")] = Precision.no,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Curves in the run's folder.")] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the settings and leave.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a task on labelled images, and write it to a store.

    The store is begun with --backbone; after that it knows its own. Also under `accelerate launch` and `torchrun`.
    Several data sets are trained together by a joint method, which makes a new backbone and begins a store with it.
    """
    changes: dict[str, Any] = {
        "epochs": epochs,
        "batch": batch,
        "size": size,
        "resize": resize,
        "seed": seed,
        "schedule": schedule,
        "drop_after": drop_after,
        "warmup": warmup,
        "label_smoothing": label_smoothing,
        "patience": patience,
        "accumulate": accumulate,
        "class_weights": class_weights,
        "keep": keep,
        "flip": flip,
        "rates": by_role(rate, "--rate"),
        "weight_decay": by_role(weight_decay, "--weight-decay"),
    }
    config = settled(preset, method, changes)
    options = method_options(method, option, preset)
    if show_config:
        _show_config(preset, config, options, as_json)
        return
    if not data or not task:
        raise typer.BadParameter("say what to train on and what to call it: bitgraft train DATA --task NAME")
    _check_number(data, task, method)
    _check_earlier(store, method, borrow, start)

    from bitgraft.cli import training
    from bitgraft.workflows.train_task import Request

    chosen = asked_backbone(store, backbone, weights, pretrained, "begin it with --backbone NAME")
    requests = [
        Request(
            source,
            name,
            method,
            config,
            options,
            workers,
            resume,
            overwrite,
            skip_bad_images,
            borrow=tuple(borrow or ()),
            start=start,
        )
        for source, name in zip(data, task, strict=True)
    ]
    training.run(store, chosen, requests, mixed_precision.value, tensorboard, as_json, _resume_command())


def _check_number(data: list[str], task: list[str], method: str) -> None:
    from bitgraft.methods import registry

    if len(data) != len(task):
        raise typer.BadParameter(f"{len(data)} data sets came with {len(task)} names: give --task NAME once for each")
    if len(data) > 1 and not registry.get(method).joint:
        joint = ", ".join(name for name in registry.method_names() if registry.get(name).joint)
        raise typer.BadParameter(
            f"several data sets at once are for a joint method ({joint}): {method} trains each by a command of its own"
        )


def _check_earlier(store: str, method: str, borrow: list[str] | None, start: str | None) -> None:
    from bitgraft.methods import registry
    from bitgraft.store import Store

    if not borrow and start is None:
        return
    if not registry.get(method).borrows:
        able = ", ".join(name for name in registry.method_names() if registry.get(name).borrows)
        raise typer.BadParameter(f"--borrow and --start take masks of earlier tasks: {able} does, {method} does not")
    if not Store.exists(store):
        raise typer.BadParameter(f"there is no store at {store} yet, so there is no task to borrow or start from")


def _show_config(preset: str, config: "Config", options: dict[str, Any], as_json: bool) -> None:
    from bitgraft.cli.output import show_json

    if as_json:
        show_json({"preset": preset, **plain(config), "options": options})
    else:
        print(toml(preset, config, options))


def _resume_command() -> str:
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    return shlex.join(["bitgraft", *given, "--resume"])

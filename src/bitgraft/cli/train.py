"""`bitgraft train`: from a folder of images to a task file."""

import json
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command
from bitgraft.cli.output import show

if TYPE_CHECKING:
    from bitgraft.training.config import Config

DATA = "FOLDER with train/ val/ test/ or one subfolder per class; DEVKIT:DOMAIN; torchvision:NAME; package:NAME."
BACKBONE = "timm's name, wrn-DEPTH-WIDTH, or package.module:function; once per store."
BITS = "What the file may take for each weight, head apart, in place of a mask: 0.05 to 4 (method full)."
BORROW = "Mix in this task's masks, which the new task then needs; repeatable."
COMPACT = "Round k and norm layers, so the file is small; not if the norm layers are to be trained on."
PRESET = "default (as long as the data asks for), quick, imagenet-to-sketch or decathlon."
RATE = "Learning rate; roles: scores, k, k1, weights, norms, head; repeatable."
CONFIG = "Settings as --show-config prints them, all or some; options given here come before those."
Names = list[str] | None
Count = int | None


@command("""
  bitgraft train photos --task flowers --backbone resnet50
  bitgraft train decathlon-1.0:gtsrb --task signs --preset decathlon --no-flip --rate k=3e-3
  bitgraft train photos --task flowers --resume
  bitgraft train photos --task small --bits 0.5
  bitgraft train few-photos --task orchids --borrow flowers --borrow leaves
  bitgraft train photos signs --task flowers --task signs --method adapters-joint --backbone resnet50 --store joint
  bitgraft train --preset imagenet-to-sketch --weight-decay 1e-4 --show-config > mine.toml
  bitgraft train photos --task flowers --config mine.toml --epochs 10""")
def train(
    context: typer.Context,
    data: Annotated[Names, Argument(metavar="DATA", help=DATA, show_default=False)] = None,
    task: Annotated[Names, Option(metavar="NAME", help="What to call the task; once for each DATA. Required.")] = None,
    backbone: Annotated[str | None, Option(metavar="NAME", help=BACKBONE)] = None,
    weights: opt.Weights = None,
    pretrained: opt.Pretrained = True,
    store: opt.StoreFolder = opt.STORE,
    method: Annotated[str, Option(metavar="NAME", help="See `bitgraft methods`.")] = "full",
    option: opt.MethodOptions = None,
    bits: Annotated[float | None, Option(help=BITS)] = None,
    borrow: Annotated[Names, Option(metavar="NAME", help=BORROW)] = None,
    start: Annotated[str | None, Option(metavar="NAME", help="Start from this task of the store.")] = None,
    preset: Annotated[str, Option(metavar="NAME", help=PRESET)] = "default",
    config_file: Annotated[Path | None, Option("--config", metavar="FILE", help=CONFIG)] = None,
    quick: Annotated[bool, Option("--quick", help="A first look: 250 steps, whatever the data.")] = False,
    epochs: Annotated[Count, Option(min=1, help="Passes over the data.")] = None,
    steps: Annotated[Count, Option(min=1, help="In place of epochs: about so many steps.")] = None,
    minutes: Annotated[float | None, Option(min=0.0, help="In place of epochs: as many as fit.")] = None,
    batch: opt.Batch = None,
    size: opt.Size = None,
    resize: opt.Resize = None,
    seed: opt.Seed = None,
    rate: Annotated[Names, Option(metavar="[ROLE=]VALUE", help=RATE)] = None,
    weight_decay: Annotated[Names, Option(metavar="[ROLE=]VALUE", help="By role; repeatable.")] = None,
    schedule: Annotated[Literal["step", "cosine", "constant"] | None, Option(help="How rates fall.")] = None,
    drop_after: Annotated[Count, Option(min=1, help="Epochs until the step schedule divides rates by 10.")] = None,
    warmup: Annotated[float | None, Option(min=0.0, max=0.99, help="Share of the run over which rates rise.")] = None,
    label_smoothing: Annotated[float | None, Option(min=0.0, max=1.0, help="Of the targets.")] = None,
    patience: Annotated[Count, Option(min=1, help="Stop after so many epochs without a better one.")] = None,
    accumulate: Annotated[Count, Option(min=1, help="Run each batch in so many parts.")] = None,
    class_weights: Annotated[Literal["balanced"] | None, Option(help="Weigh rare classes as much as others.")] = None,
    keep: Annotated[Literal["best", "last"] | None, Option(help="Which epoch to keep.")] = None,
    flip: Annotated[bool | None, Option("--flip/--no-flip", help="Mirror images [as the data allow].")] = None,
    compact: Annotated[bool, Option("--compact/--no-compact", help=COMPACT)] = True,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
    overwrite: opt.Overwrite = False,
    skip_bad_images: Annotated[bool, Option("--skip-bad-images", help="Skip and list unreadable files.")] = False,
    workers: opt.Workers = 0,
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], Option(help="Of the computation.")] = "no",
    tensorboard: Annotated[bool, Option("--tensorboard", help="Write curves to the run's folder.")] = False,
    show_config: Annotated[bool, Option("--show-config", help="Print the settings and exit.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a task on labelled images and write it to a store.

    --backbone starts a store, which remembers it. Works under `accelerate launch` and `torchrun`, too. Several data
    sets are trained together by a joint method, which makes a new backbone and starts a store with it.
    """
    filed = _read(config_file) if config_file is not None else {}
    preset, method = (_chosen(context, filed, name) for name in ("preset", "method"))
    if quick and preset != "default":
        raise typer.BadParameter(f"--quick is a preset of its own: leave it out, or --preset {preset}")
    if sum(given is not None for given in (epochs, steps, minutes)) > 1:
        raise typer.BadParameter("give only one of --epochs, --steps and --minutes")
    preset = "quick" if quick else preset
    given = [*(option or ()), *([f"bits={bits}"] if bits is not None else ())]
    options = opt.method_options(method, given, preset, filed.pop("options", {}))
    config = _config({**context.params, "preset": preset, "method": method}, filed)
    if show_config:
        values = {"preset": preset, "method": method, **asdict(config), "options": options}
        show(as_json, values, _toml(values))
        return
    if not data or not task:
        raise typer.BadParameter("name the data and the task: bitgraft train DATA --task NAME")
    _check(store, method, data, task, [*(borrow or ()), *([start] if start else ())])

    from bitgraft.cli import training
    from bitgraft.workflows.train_task import Request

    chosen = opt.asked_backbone(store, backbone, weights, pretrained, "start it with --backbone NAME")
    how: dict[str, Any] = {"workers": workers, "resume": resume, "overwrite": overwrite, "compact": compact}
    how |= {"skip_bad": skip_bad_images, "borrow": tuple(borrow or ()), "start": start}
    requests = [Request(source, name, method, config, options, **how) for source, name in zip(data, task, strict=True)]
    again = shlex.join(["bitgraft", *(argument for argument in sys.argv[1:] if argument != "--resume"), "--resume"])
    training.run(store, chosen, requests, mixed_precision, tensorboard, as_json, again)


def _read(file: Path) -> dict[str, Any]:
    """Settings from a file, TOML or JSON."""
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (OSError, ValueError) as fault:
        raise typer.BadParameter(
            f"--config {file} cannot be read: {getattr(fault, 'strerror', None) or fault}"
        ) from fault
    return dict(values)


def _chosen(context: typer.Context, filed: dict[str, Any], name: str) -> str:
    """What the command line says, else the file, else the option's default."""
    source = context.get_parameter_source(name)
    stated = filed.pop(name, context.params[name])
    return str(context.params[name] if source is not None and source.name == "COMMANDLINE" else stated)


def _config(given: Mapping[str, Any], filed: Mapping[str, Any]) -> "Config":
    """The preset as it is for the method, with what a file changes in it and then the options that were given, which
    have the settings' names."""
    from bitgraft.errors import TrainingError
    from bitgraft.training.config import Config
    from bitgraft.training.presets import preset

    changes = {f.name: given[f.name] for f in fields(Config) if given.get(f.name) is not None}
    changes["rates"] = opt.by_role(given["rate"], "--rate")
    changes["weight_decay"] = opt.by_role(given["weight_decay"], "--weight-decay")
    try:
        return preset(given["preset"], given["method"]).changed(**filed).changed(**changes)
    except (TrainingError, TypeError) as fault:
        raise typer.BadParameter(str(fault)) from fault


def _check(store: str, method: str, data: list[str], task: list[str], earlier: list[str]) -> None:
    from bitgraft.methods import registry
    from bitgraft.store import Store

    def those_that(have: str) -> str:
        return ", ".join(name for name in registry.method_names() if getattr(registry.get(name), have))

    if len(data) != len(task):
        raise typer.BadParameter(f"{len(data)} data sets came with {len(task)} names: give --task NAME once for each")
    if len(data) > 1 and not registry.get(method).joint:
        raise typer.BadParameter(
            f"only a joint method ({those_that('joint')}) trains several data sets at once: for {method} give one "
            "command for each"
        )
    if earlier and not registry.get(method).borrows:
        raise typer.BadParameter(f"--borrow and --start work with method {those_that('borrows')}, not with {method}")
    if earlier and not Store.exists(store):
        raise typer.BadParameter(f"there is no store at {store} yet, so there is no task to borrow or start from")


def _toml(values: Mapping[str, Any]) -> str:
    """Tables come last; what is not set is a comment."""
    lines = []
    for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            lines.append(f"\n[{name}]\n{_toml(value)}")
        else:
            lines.append(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(lines)

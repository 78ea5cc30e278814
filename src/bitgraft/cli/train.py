"""`bitgraft train`: train a task on a folder of images."""

import json
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command, count, flag, number, setting
from bitgraft.cli.output import show
from bitgraft.methods import registry
from bitgraft.store import Store
from bitgraft.training import presets

DATA = "A folder with train/ val/ test/ or one subfolder per class; DEVKIT:DOMAIN; torchvision:NAME; package:NAME."
BACKBONE = "A timm model, wrn-DEPTH-WIDTH, or package.module:function; only for a new store."
BITS = "File size in bits per weight, without the head; replaces the mask (method full)."
BORROW = "Mix in the masks of this task, which the new one then depends on; repeatable."
COMPACT = "Round k and norm layers for a smaller file; do not if you will train the norm layers further."
PRESET = "default, quick, imagenet-to-sketch or decathlon."
RATE = "Learning rate, of all or of one role: scores, k, k1, weights, norms, head; repeatable."
CONFIG = "A file of settings, all or some, as --show-config prints them; other options override it."
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
    task: Annotated[Names, setting("NAME", "The task's name; once for each DATA. Required.")] = None,
    backbone: Annotated[str | None, setting("NAME", BACKBONE)] = None,
    weights: opt.Weights = None,
    pretrained: opt.Pretrained = True,
    store: opt.StoreFolder = opt.STORE,
    method: Annotated[str, setting("NAME", "See `bitgraft methods`.")] = "full",
    option: opt.MethodOptions = None,
    bits: Annotated[float | None, number(BITS, 0.05, 4.0)] = None,
    borrow: Annotated[Names, setting("NAME", BORROW)] = None,
    start: Annotated[str | None, setting("NAME", "Start from this task of the store.")] = None,
    preset: Annotated[str, setting("NAME", PRESET)] = "default",
    config_file: Annotated[Path | None, Option("--config", metavar="FILE", help=CONFIG)] = None,
    quick: Annotated[bool, flag("--quick", "A first try of 250 steps; same as --preset quick.")] = False,
    epochs: Annotated[Count, count("Epochs to train [chosen from the size of the data].")] = None,
    steps: Annotated[Count, count("Train for about N steps instead.")] = None,
    minutes: Annotated[float | None, number("Train for as many epochs as fit instead.", 0.0)] = None,
    batch: opt.Batch = None,
    size: opt.Size = None,
    resize: opt.Resize = None,
    seed: opt.Seed = None,
    rate: Annotated[Names, setting("[ROLE=]VALUE", RATE)] = None,
    weight_decay: Annotated[Names, setting("[ROLE=]VALUE", "Weight decay, of all or of one role; repeatable.")] = None,
    schedule: Annotated[Literal["step", "cosine", "constant"] | None, Option(help="Learning rate schedule.")] = None,
    drop_after: Annotated[Count, count("Epoch after which `step` divides rates by 10.")] = None,
    warmup: Annotated[float | None, number("Warm-up, as a share of the run.", 0.0, 0.99)] = None,
    label_smoothing: Annotated[float | None, number("Label smoothing.", 0.0, 1.0)] = None,
    patience: Annotated[Count, count("Stop after N epochs without improvement.")] = None,
    accumulate: Annotated[Count, count("Run each batch in N parts, to save memory.")] = None,
    class_weights: Annotated[Literal["balanced"] | None, Option(help="Weight classes equally in the loss.")] = None,
    keep: Annotated[Literal["best", "last"] | None, Option(help="The epoch to keep.")] = None,
    flip: Annotated[bool | None, Option("--flip/--no-flip", help="Mirror images [if the data allow it].")] = None,
    compact: Annotated[bool, Option("--compact/--no-compact", help=COMPACT)] = True,
    resume: Annotated[bool, flag("--resume", "Continue an interrupted run.")] = False,
    overwrite: opt.Overwrite = False,
    skip_bad_images: Annotated[bool, flag("--skip-bad-images", "Skip unreadable files, and list them.")] = False,
    workers: opt.Workers = 0,
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], Option(help="Mixed-precision training.")] = "no",
    tensorboard: Annotated[bool, flag("--tensorboard", "Write TensorBoard logs to the run's folder.")] = False,
    show_config: Annotated[bool, flag("--show-config", "Print the settings and exit.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a task on labelled images and write it to a store.

    --backbone creates a store, which remembers it. A joint method trains several data sets together, and creates a
    store with a new backbone. Also works under `accelerate launch` and `torchrun`.
    """
    from_file = _read(config_file) if config_file is not None else {}
    if quick and preset != "default":
        raise typer.BadParameter(f"--quick is --preset quick: leave out either --quick or --preset {preset}")
    if sum(given is not None for given in (epochs, steps, minutes)) > 1:
        raise typer.BadParameter("give only one of --epochs, --steps and --minutes")
    preset, method = (_chosen(context, from_file, name) for name in ("preset", "method"))
    given = [*(option or ()), *([f"bits={bits}"] if bits is not None else ())]
    options = opt.method_options(method, given, preset, from_file.pop("options", {}))
    config = opt.changed(presets.preset(preset, method), context.params, from_file)
    if show_config:
        values = {"preset": preset, "method": method, **asdict(config), "options": options}
        show(as_json, values, _toml(values))
        return
    if not data or not task:
        raise typer.BadParameter("name the data and the task: bitgraft train DATA --task NAME")
    _check(store, method, data, task, [*(borrow or ()), *([start] if start else ())])

    from bitgraft.cli import training
    from bitgraft.workflows.train_task import Request

    chosen = opt.requested_backbone(store, backbone, weights, pretrained, "create it with --backbone NAME")
    how: dict[str, Any] = {"workers": workers, "resume": resume, "overwrite": overwrite, "compact": compact}
    how |= {"skip_bad": skip_bad_images, "borrow": tuple(borrow or ()), "start": start}
    requests = [Request(source, name, method, config, options, **how) for source, name in zip(data, task, strict=True)]
    to_resume = shlex.join(["bitgraft", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
    training.run(store, chosen, requests, mixed_precision, tensorboard, as_json, to_resume)


def _read(file: Path) -> dict[str, Any]:
    """Read settings from a TOML or JSON file."""
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"--config {file} cannot be read: {reason}") from error
    if not isinstance(values.get("options", {}), dict):
        raise typer.BadParameter(f"--config {file}: options={values['options']!r}: give a table, [options]")
    return dict(values)


def _chosen(context: typer.Context, from_file: dict[str, Any], name: str) -> str:
    """Return the preset or method on the command line, else the file's, else the default.

    A file's settings belong to the preset and method that it names, so the command line must not name others.
    """
    source, value, in_file = context.get_parameter_source(name), context.params[name], from_file.pop(name, None)
    option = f"--{name} {value}"
    if name == "preset" and context.params["quick"]:
        value, option = "quick", "--quick"
    elif source is None or source.name != "COMMANDLINE":
        return str(value if in_file is None else in_file)
    if in_file not in (None, value):
        raise typer.BadParameter(
            f"{option} does not go with {context.params['config_file']}, which is for {name} {in_file!r}: leave out "
            f"{option}, or keep in the file only the settings that you changed, without {name}"
        )
    return str(value)


def _check(store: str, method: str, data: list[str], task: list[str], earlier: list[str]) -> None:
    def methods_with(feature: str) -> str:
        return ", ".join(name for name in registry.method_names() if getattr(registry.get(name), feature))

    if len(data) != len(task):
        raise typer.BadParameter(f"give one --task per data set (data sets: {len(data)}, tasks: {len(task)})")
    if len(data) > 1 and not registry.get(method).joint:
        raise typer.BadParameter(
            f"only a joint method ({methods_with('joint')}) trains several data sets together: with {method}, run one "
            "command for each"
        )
    if earlier and not registry.get(method).borrows:
        raise typer.BadParameter(f"--borrow and --start need method {methods_with('borrows')}, not {method}")
    if earlier and not Store.exists(store):
        raise typer.BadParameter(f"--borrow and --start need a store, and there is none at {store}")


def _toml(values: Mapping[str, Any]) -> str:
    """Format settings as TOML: tables last, unset values as comments."""
    lines = []
    for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            lines.append(f"\n[{name}]\n{_toml(value)}")
        else:
            lines.append(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(lines)

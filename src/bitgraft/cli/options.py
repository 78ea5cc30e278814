"""Options that several commands share, and the parsing of their values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from bitgraft.cli.app import count, setting
from bitgraft.errors import TaskError, TrainingError
from bitgraft.methods import registry
from bitgraft.store import SUFFIX, Backbone, Store
from bitgraft.training.config import ROLES, Config

if TYPE_CHECKING:
    from bitgraft.network import Network

STORE = "bitgraft-store"
EngineName = Literal["auto", "torch", "onnxruntime"]


def complete_tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Return task names for shell completion, without opening a file."""
    folder = Path(context.params.get("store") or STORE)
    return sorted(p.stem for p in folder.glob(f"[!.]*{SUFFIX}") if p.stem.startswith(incomplete))


AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
StoreFolder = Annotated[str, Option("--store", metavar="DIR", help="The store's folder.")]
_TASK = Option("--task", metavar="NAME", help="A task in the store.", autocompletion=complete_tasks)
_TASKS = Option("--task", metavar="NAME", help="A task in the store; repeatable.", autocompletion=complete_tasks)
TaskName = Annotated[str, _TASK]
TaskNames = Annotated[list[str] | None, _TASKS]
AllTasks = Annotated[bool, Option("--all-tasks", help="Every task in the store.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace what is already there.")]
Workers = Annotated[int, count("Processes that load images; 0 uses none.", least=0)]
Weights = Annotated[str | None, setting("SOURCE", "The backbone's weights: a file, or package:NAME.")]
Pretrained = Annotated[bool, Option(help="Use published weights unless --weights is given.")]
Head = Annotated[str | None, setting("LAYER", "The layer that a task replaces; `none` for features.")]
Batch = Annotated[int | None, count("Images per step, over all processes.")]
Size = Annotated[int | None, Option(min=1, metavar="PIXELS", help="Side of the square input [the backbone's own].")]
Resize = Annotated[int | None, Option(min=1, metavar="PIXELS", help="Length of the shorter side before the crop.")]
Device = Annotated[str, setting("NAME", "The torch device: cpu, cuda, mps.")]
Seed = Annotated[int | None, count("Random seed.", least=0)]
SplitSeed = Annotated[int, Option("--seed", min=0, metavar="N", help="The seed that training split the data with.")]
MethodOptions = Annotated[list[str] | None, setting("NAME=VALUE", "An option of the method, such as k1=0; repeatable.")]
Engine = Annotated[EngineName, Option(help="auto: onnxruntime on a CPU if that is faster, else PyTorch.")]
ImageFiles = Annotated[list[str], Argument(metavar="IMAGE", help="Image files, or folders of them.")]
Suite = Annotated[str, Argument(metavar="SUITE", help="A built-in suite (`bitgraft bench --list`), or a .toml file.")]
Root = Annotated[Path, setting("DIR", "The folder of the data sets.")]


def requested_backbone(
    store: str, name: str | None, weights: str | None, pretrained: bool, remedy: str
) -> Backbone | None:
    """Return the backbone that the options name, or None for the store's own; an error ends with `remedy`."""
    if name is not None:
        return Backbone(name, weights, pretrained)
    if not Store.exists(store):
        raise typer.BadParameter(f"there is no store at {store} yet: {remedy}")
    return None if weights is None else Backbone(Store(store).backbone.name, weights, pretrained)


def chosen_tasks(store: str, named: Sequence[str] | None, all_tasks: bool) -> list[str]:
    """Return the tasks given by --task or --all-tasks; a store's only task need not be named."""
    known = Store(store).names()
    if all_tasks and named:
        raise typer.BadParameter("give either --task or --all-tasks, not both")
    if named:
        return list(dict.fromkeys(named))
    if not known:
        raise typer.BadParameter(f"the store at {store} has no tasks yet")
    if all_tasks or len(known) == 1:
        return known
    raise typer.BadParameter(f"give --task NAME or --all-tasks; the store has {', '.join(known)}")


def network_with(store: str, names: Sequence[str], device: str = "cpu") -> "Network":
    """Return the store's network with these tasks, in evaluation mode, on a device."""
    opened = Store(store)
    net = opened.network().eval()
    try:
        net.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises any of them without the device
        reason = str(error).partition("\n")[0].rstrip(".")
        raise typer.BadParameter(f"--device {device} does not work here: {reason}") from error
    for name in names:
        if name != net.original and name not in net.tasks:  # a task loads those it depends on
            opened.load(net, name)
    return net


def changed(config: Config, given: Mapping[str, Any], from_file: Mapping[str, Any] | None = None) -> Config:
    """Change settings by a file and then by the options of a command, which have the settings' names."""
    changes = {f.name: given[f.name] for f in fields(Config) if given.get(f.name) is not None}
    changes["rates"] = _by_role(given["rate"], "--rate")
    changes["weight_decay"] = _by_role(given.get("weight_decay"), "--weight-decay")
    try:
        return config.changed(**(from_file or {})).changed(**changes)
    except (TrainingError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error


def _by_role(given: Sequence[str] | None, option: str) -> dict[str, float]:
    """Parse ROLE=VALUE pairs; a value alone applies to every role."""
    values: dict[str, float] = {}
    for text in given or ():
        role, _, value = text.rpartition("=")
        try:
            values |= {role: float(value)} if role else dict.fromkeys(ROLES, float(value))
        except ValueError:
            raise typer.BadParameter(f"{option} {text}: give ROLE=NUMBER, as in {option} k=3e-3") from None
    return values


def method_options(
    method: str, given: Sequence[str] | None, preset: str | None = None, from_file: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the preset's options, updated by a file's and then by NAME=VALUE pairs, checked by the method."""
    try:
        options = registry.preset_options(preset, method) | dict(from_file or {})
        for text in given or ():
            name, equals, value = text.partition("=")
            if not equals:
                raise typer.BadParameter(f"--option {text}: give NAME=VALUE, as in --option k1=0")
            options[name] = _value(value)
        registry.get(method).with_options(options)
    except (TaskError, TypeError) as error:
        where = " (check [options] in the --config file)" if from_file and not given else ""
        raise typer.BadParameter(f"{error}{where}") from error
    return options


def _value(text: str) -> Any:
    """Parse JSON, True, False, yes or no; anything else is a string."""
    words = {"True": True, "False": False, "yes": True, "no": False}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text

"""Options that several commands have, and how their values are read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from bitgraft.network import Network
    from bitgraft.store import Backbone

STORE = "bitgraft-store"
EngineName = Literal["auto", "torch", "onnxruntime"]


def complete_tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Names of task files for the shell to complete, without opening any."""
    folder = Path(context.params.get("store") or STORE)
    return sorted(p.stem for p in folder.glob("[!.]*.safetensors") if p.stem.startswith(incomplete))


AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
StoreFolder = Annotated[str, Option("--store", metavar="DIR", help="The store's folder.")]
_TASK = Option("--task", metavar="NAME", help="A task in the store.", autocompletion=complete_tasks)
TaskName = Annotated[str, _TASK]
TaskNames = Annotated[list[str] | None, _TASK]
AllTasks = Annotated[bool, Option("--all-tasks", help="Every task in the store.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace what is already there.")]
Workers = Annotated[int, Option(min=0, metavar="N", help="Processes that load images.")]
Weights = Annotated[str | None, Option(metavar="SOURCE", help="The backbone's weights: a file, or package:NAME.")]
Pretrained = Annotated[bool, Option(help="Use published weights if no others are given.")]
Head = Annotated[str | None, Option(metavar="LAYER", help="The layer that a task replaces; none for features.")]
Batch = Annotated[int | None, Option(min=1, help="Images per step, over all processes.")]
Size = Annotated[int | None, Option(min=1, help="Pixels of a square input [the backbone's own].")]
Resize = Annotated[int | None, Option(min=1, help="Pixels of the shorter side before the crop.")]
Device = Annotated[str, Option(metavar="NAME", help="Where the network runs, as torch calls it: cpu, cuda, mps.")]
Seed = Annotated[int | None, Option(min=0, help="Of everything that is random.")]
MethodOptions = Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="Of the method, as in k1=0; repeatable.")]
Engine = Annotated[EngineName, Option(help="What runs the weights; auto is onnxruntime on a CPU where it pays.")]
Suite = Annotated[str, Argument(metavar="SUITE", help="A built-in suite (`bitgraft bench --list`), or a .toml file.")]
Root = Annotated[Path, Option(metavar="DIR", help="The folder of the data sets.")]


def asked_backbone(store: str, name: str | None, weights: str | None, pretrained: bool, hint: str) -> "Backbone | None":
    """The backbone that was asked for; None: the store's own. `hint` says what to do when there is neither."""
    from bitgraft.store import Backbone, Store

    if name is not None:
        return Backbone(name, weights, pretrained)
    if not Store.exists(store):
        raise typer.BadParameter(f"there is no store at {store} yet: {hint}")
    return None if weights is None else Backbone(Store(store).backbone.name, weights, pretrained)


def chosen_tasks(store: str, asked: Sequence[str] | None, every: bool) -> list[str]:
    """The tasks named by --task, or all; a store's only task need not be named."""
    from bitgraft.store import Store

    there = Store(store).names()
    if every and asked:
        raise typer.BadParameter("--task and --all-tasks exclude each other")
    if asked:
        return list(dict.fromkeys(asked))
    if not there:
        raise typer.BadParameter(f"the store at {store} has no tasks yet")
    if every or len(there) == 1:
        return there
    raise typer.BadParameter(f"give --task NAME or --all-tasks; the store has {', '.join(there)}")


def several_tasks(store: str) -> bool:
    from bitgraft.store import Store

    return len(Store(store).names()) > 1


def network_with(store: str, names: Sequence[str], device: str = "cpu") -> "Network":
    """The store's network with these tasks in it, in evaluation mode, on a device."""
    from bitgraft.store import Store

    opened = Store(store)
    net = _on(opened.network().eval(), device)
    for name in names:
        if name != net.original and name not in net.tasks:  # another task may have needed it
            opened.load(net, name)
    return net


def _on(net: "Network", device: str) -> "Network":
    try:
        return net.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as fault:  # no such device, or none here
        reason = str(fault).partition("\n")[0].rstrip(".")
        raise typer.BadParameter(f"--device {device} does not work here: {reason}") from fault


def by_role(given: Sequence[str] | None, option: str) -> dict[str, float]:
    """ROLE=VALUE pairs; a value alone is for every role."""
    from bitgraft.training.config import ROLES

    values: dict[str, float] = {}
    for text in given or ():
        role, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise typer.BadParameter(f"{option} {text}: give ROLE=NUMBER, as in {option} k=3e-3") from None
        if not 0 <= number < float("inf"):
            raise typer.BadParameter(f"{option} {text}: the number must not be negative")
        if role and role not in ROLES:
            raise typer.BadParameter(f"{option} {text}: there is no role {role!r}; roles are {', '.join(ROLES)}")
        values |= {role: number} if role else dict.fromkeys(ROLES, number)
    return values


def method_options(
    method: str, given: Sequence[str] | None, preset: str | None = None, filed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """NAME=VALUE pairs on top of a file's and the preset's own, checked against the method; values may be JSON."""
    from bitgraft.errors import TaskError
    from bitgraft.methods import registry
    from bitgraft.methods.preset_options import OPTIONS, preset_options

    options = preset_options(preset if preset in OPTIONS else None, method) | dict(filed or {})
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {text}: give NAME=VALUE, as in --option k1=0")
        options[name] = _value(value)
    try:
        registry.get(method).with_options(options)
    except (TaskError, TypeError) as fault:
        raise typer.BadParameter(str(fault)) from fault
    return options


def _value(text: str) -> Any:
    words = {"True": True, "False": False, "yes": True, "no": False}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text

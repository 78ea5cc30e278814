"""A fine-tuned copy of a backbone, from wherever it is, as a task of method finetune: checked, and able to run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.weight_files import check, prepare, read_weights
from bitgraft.errors import BackboneError, ClassesError, TaskError
from bitgraft.network import Network
from bitgraft.runtime.heads import class_names
from bitgraft.store import SUFFIX, Store
from bitgraft.task import Task

Finetuned = Task | nn.Module | Mapping[str, Tensor] | str | Path
"""A task of the network, a module of the backbone's class, its state dict; or a file of plain weights, a task file, or
STORE/TASK."""
Classes = int | Sequence[str]


@contextmanager
def opened(
    net: Network,
    source: Finetuned,
    classes: Classes | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """The fine-tuned copy as a task of the network, for as long as the context lasts."""
    if isinstance(source, Task):
        yield _usable(net, source, classes, f"task {source.name!r}")
        return
    name = _free_name(net)
    try:
        task = _take_in(net, name, source, classes, preprocessing)
        yield _usable(net, task, classes, str(source) if isinstance(source, str | Path) else "the fine-tuned copy")
    finally:
        if name in net.tasks:
            net.remove_task(name)


def _take_in(
    net: Network, name: str, source: Finetuned, classes: Classes | None, preprocessing: Mapping[str, Any] | None
) -> Task:
    if isinstance(source, nn.Module):
        return _from_state(net, name, source.state_dict(), classes, preprocessing, "the fine-tuned module")
    if isinstance(source, Mapping):
        return _from_state(net, name, source, classes, preprocessing, "the state dict")
    assert not isinstance(source, Task)
    path, about = file_of(source)
    if is_task(about):
        return net.load_task(path, name=name)
    if classes is None and "classes" in about:
        classes = json.loads(about["classes"])
    if preprocessing is None and "preprocessing" in about:
        preprocessing = json.loads(about["preprocessing"])
    state = prepare(read_weights(path), net.backbone, path)
    return _from_state(net, name, state, classes, preprocessing, path)


def file_of(source: str | Path) -> tuple[str, dict[str, str]]:
    """The file that is meant, and what it says of itself (`bitgraft export` writes classes and preprocessing)."""
    path = Path(source)
    if not path.exists() and Store.exists(path.parent):
        path = Store(path.parent).file(path.name.removesuffix(SUFFIX))
    return str(path), _metadata(path)


def is_task(about: Mapping[str, str]) -> bool:
    return set(about) == {"bitgraft"}


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except Exception:  # no safetensors file; whoever reads it will say so
        return {}


def _from_state(
    net: Network,
    name: str,
    state: Mapping[str, Tensor],
    classes: Classes | None,
    preprocessing: Mapping[str, Any] | None,
    source: str,
) -> Task:
    anatomy, state = net.anatomy, _untied(state, net.anatomy, source)
    expected = dict(net.backbone.state_dict())
    outputs = _outputs(state, anatomy)
    for part in anatomy.head_names() if outputs is not None else ():
        if part in expected:
            expected[part] = torch.empty((outputs or 0, *expected[part].shape[1:]), device="meta")
    check(state, expected, type(net.backbone).__name__, source)
    _refuse_nonsense(state, source)
    names = classes if classes is not None else outputs
    if outputs is not None and len(class_names(names) or ()) != outputs:
        raise ClassesError(
            f"the head of {source}, {anatomy.head!r}, has {outputs} outputs, but {len(class_names(names) or ())} "
            "classes were named: name as many, in the order of its outputs"
        )
    task = net.add_task(
        name,
        names,
        "finetune",
        head="keep" if anatomy.head_tied else "auto" if outputs is not None else None,
        preprocessing=preprocessing,
    )
    with torch.no_grad():
        for part, tensor in task.owned.items():
            if part in state:
                tensor.copy_(state[part])
    return task


def _outputs(state: Mapping[str, Tensor], anatomy: Anatomy) -> int | None:
    """How many outputs the copy's head has; the backbone's own number where it cannot be told."""
    if anatomy.head is None:
        return None
    name = f"{anatomy.heads[0]}.weight"
    for weight in (state.get(name), anatomy.tensor(name) if name in anatomy.places else None):
        if weight is not None and weight.dim():
            return int(weight.shape[0])
    raise BackboneError(f"the head {anatomy.head!r} has no weight that says how many classes there are")


def _untied(state: Mapping[str, Tensor], anatomy: Anatomy, source: str) -> dict[str, Tensor]:
    """With all names of tensors that the backbone has in several places; a file may have one of them."""
    whole = dict(state)
    for places in anatomy.places.values():
        names = [f"{path}.{attribute}" if path else attribute for path, attribute in places]
        held = [name for name in names if name in state]
        for name in held[1:]:
            if not torch.equal(state[name], state[held[0]]):
                raise BackboneError(f"{source} has {name!r} unlike {held[0]!r}, which are one tensor in the backbone")
        if held and len(names) > 1:
            whole |= dict.fromkeys(names, state[held[0]])
    return whole


def _refuse_nonsense(state: Mapping[str, Tensor], source: str) -> None:
    odd = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if odd:
        raise BackboneError(
            f"{source} has values that are not finite in {len(odd)} tensors, first {odd[0]!r}: its training went wrong"
        )


def _usable(net: Network, task: Task, classes: Classes | None, source: str) -> Task:
    if net.tasks.get(task.name) is not task:
        raise TaskError(f"{source} is not one of this network's: load it there first")
    if any(transform.tail is not None for transform in task.transforms.values()):
        raise TaskError(
            f"{source} is of method {task.metadata.method!r}, which adds layers: only changed weights can be compressed"
        )
    _refuse_nonsense(values(task), source)
    names = class_names(classes)
    if names is not None and len(names) != len(task.classes or ()):
        raise ClassesError(f"{len(names)} classes were named, but {source} has {len(task.classes or ())}")
    return task.eval()


@torch.no_grad()
def values(task: Task) -> dict[str, Tensor]:
    """Every tensor of the copy by the backbone's names, head included where it is the backbone's last layer."""
    kept = task.anatomy.tensors()
    return {name: tensor.detach() for name, tensor in {**kept, **task.tensors(), **task.owned}.items()}


def _free_name(net: Network) -> str:
    name = "copy.being.compressed"  # nobody calls a task so
    while name in net.tasks or name == net.original:
        name += "-"
    return name

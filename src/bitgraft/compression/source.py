"""Load a fine-tuned copy of a backbone from any source, as a task of method finetune."""

import json
import secrets
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
from bitgraft.transforms.bits import is_finite

Finetuned = Task | nn.Module | Mapping[str, Tensor] | str | Path
"""A task of the network, a module of the backbone's class or its state dict; or a file of plain weights, a task file,
or STORE/TASK."""
Classes = int | Sequence[str]


@contextmanager
def finetuned_task(
    net: Network, source: Finetuned, classes: Classes | None = None, preprocessing: Mapping[str, Any] | None = None
) -> Iterator[Task]:
    """Yield the fine-tuned copy as a task of the network, which is removed on exit if it was added here."""
    if isinstance(source, Task):
        yield _check(net, source, classes, f"task {source.name!r}")
        return
    name = f"copy-{secrets.token_hex(8)}"
    try:
        shown = str(source) if isinstance(source, str | Path) else "the fine-tuned copy"
        yield _check(net, _add(net, name, source, classes, preprocessing, shown), classes, shown)
    finally:
        if name in net.tasks:
            net.remove_task(name)


def find_file(source: str | Path) -> tuple[str, dict[str, str]]:
    """Return the path of a file or STORE/TASK, and its metadata if bitgraft wrote it."""
    path = Path(source)
    if not path.exists() and Store.exists(path.parent):
        path = Store(path.parent).file(path.name.removesuffix(SUFFIX))
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except Exception:  # not a safetensors file; reading it will raise a better error
        metadata = {}
    return str(path), metadata if "bitgraft" in metadata else {}


def is_task_file(metadata: Mapping[str, str]) -> bool:
    return set(metadata) == {"bitgraft"}


def _add(
    net: Network,
    name: str,
    source: nn.Module | Mapping[str, Tensor] | str | Path,
    classes: Classes | None,
    preprocessing: Mapping[str, Any] | None,
    shown: str,
) -> Task:
    """Add the copy to the network: load a task file, or wrap weights in a task of method finetune."""
    if isinstance(source, str | Path):
        path, metadata = find_file(source)
        if is_task_file(metadata):
            return net.load_task(path, name=name)
        classes = json.loads(metadata.get("classes", "null")) if classes is None else classes
        preprocessing = preprocessing or json.loads(metadata.get("preprocessing", "null"))
        state: Mapping[str, Tensor] = prepare(read_weights(path), net.backbone, path)
    else:
        state = source.state_dict() if isinstance(source, nn.Module) else source
    state, outputs = _untied(state, net.anatomy, shown), _outputs(state, net.anatomy)
    expected, head = dict(net.backbone.state_dict()), net.anatomy.head_names() if outputs is not None else []
    for part in expected.keys() & set(head):
        expected[part] = torch.empty((outputs or 0, *expected[part].shape[1:]), device="meta")
    check(state, expected, type(net.backbone).__name__, shown)
    if outputs is not None:
        _check_classes(classes, outputs, f"the head of {shown}, {net.anatomy.head!r},")
    names = classes if classes is not None else outputs
    kind = "keep" if net.anatomy.head_tied else "auto" if outputs is not None else None
    task = net.add_task(name, names, "finetune", head=kind, preprocessing=preprocessing)  # type: ignore[arg-type]
    with torch.no_grad():
        for part, tensor in task.owned.items():
            if part in state:
                tensor.copy_(state[part])
    return task


def _outputs(state: Mapping[str, Tensor], anatomy: Anatomy) -> int | None:
    """Return the number of outputs of the copy's head, or of the backbone's if the copy has none."""
    if anatomy.head is None:
        return None
    name = f"{anatomy.heads[0]}.weight"
    weight = state.get(name, anatomy.tensors().get(name))
    if weight is None or not weight.dim():
        raise BackboneError(f"cannot tell the number of classes: the head {anatomy.head!r} has no weight")
    return len(weight)


def _untied(state: Mapping[str, Tensor], anatomy: Anatomy, source: str) -> dict[str, Tensor]:
    """Return the state under all names of tied tensors, of which a file may have only one."""
    whole = dict(state)
    for places in anatomy.places.values():
        names = [f"{path}.{attribute}" if path else attribute for path, attribute in places]
        held = [name for name in names if name in state]
        for name in held[1:]:
            if not torch.equal(state[name], state[held[0]]):
                raise BackboneError(f"{name!r} and {held[0]!r} differ in {source}, but are tied in the backbone")
        if held:
            whole |= dict.fromkeys(names, state[held[0]])
    return whole


def _check(net: Network, task: Task, classes: Classes | None, source: str) -> Task:
    if net.tasks.get(task.name) is not task:
        raise TaskError(f"{source} does not belong to this network: load it there first")
    if any(transform.tail is not None for transform in task.transforms.values()):
        raise TaskError(f"{source} cannot be compressed: its method {task.metadata.method!r} adds layers")
    odd = [name for name, tensor in values(task).items() if tensor.is_floating_point() and not is_finite(tensor)]
    if odd:
        raise BackboneError(
            f"{source} has values that are not finite in {len(odd)} tensors, first {odd[0]!r}: train it again"
        )
    _check_classes(classes, len(task.classes or ()), source)
    return task.eval()


def _check_classes(classes: Classes | None, outputs: int, source: str) -> None:
    names = class_names(classes)
    if names is not None and len(names) != outputs:
        raise ClassesError(
            f"{source} has {outputs} outputs, but {len(names)} classes were given: give one per output, in order"
        )


@torch.no_grad()
def values(task: Task) -> dict[str, Tensor]:
    """Return all tensors of the copy by the backbone's names, including a replaced last layer."""
    kept = task.anatomy.tensors()
    return {name: tensor.detach() for name, tensor in {**kept, **task.tensors(), **task.owned}.items()}

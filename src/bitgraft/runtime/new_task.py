"""Build tasks: new ones, those in files, and the backbone's own."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.errors import TaskError, WrongBackboneError
from bitgraft.format import archive, dependencies, restore
from bitgraft.format.metadata import HeadKind, Metadata
from bitgraft.methods import registry
from bitgraft.runtime import heads
from bitgraft.task import Task
from bitgraft.transforms.masked import Masked


def new_task(
    anatomy: Anatomy,
    tasks: Mapping[str, Task],
    name: str,
    classes: int | Sequence[str] | None,
    method: str,
    head: Any,
    preset: str | None,
    seed: int,
    preprocessing: Mapping[str, Any] | None,
    borrow: Sequence[str],
    start: str | None,
    options: Mapping[str, Any],
) -> Task:
    """Return a new task as `Network.add_task` describes it, which may build on `tasks`."""
    recipe = registry.get(method)
    chosen = recipe.with_options({**registry.preset_options(preset, method), **options})
    rng = torch.Generator().manual_seed(seed)
    start_task = dependencies.get_earlier(recipe, tasks, start) if start is not None else None
    earlier = dependencies.choose(recipe, tasks, borrow)
    transforms = registry.transforms(recipe, anatomy, chosen, rng, [task.transforms for task in earlier])
    owned = registry.owned(recipe, anatomy, chosen)
    archive.refuse_unstorable(name, owned)
    _refuse_shared(head, anatomy, tasks)
    kind, names, tensors, module = heads.plan_head(anatomy, classes, head, rng)
    stated = heads.stated_preprocessing(anatomy.backbone) if preprocessing is None else preprocessing
    metadata = Metadata(
        name=name,
        method=method,
        options=asdict(chosen),
        head=kind,
        classes=names,
        preprocessing=dict(stated),
        depends_on={task.name: dependencies.content_hash(task) for task in earlier},
    )
    task = Task(metadata, anatomy, transforms, {**owned, **tensors}, module)
    task.earlier = tuple(earlier)
    task.preset = preset or "default"
    if start_task is not None:
        _start_from(task, start_task)
    dependencies.freeze(earlier)
    return task


def _start_from(task: Task, earlier: Task) -> None:
    """Copy another task's masks, k and norm layers, but not its head."""
    theirs, stored, head = earlier.transforms, earlier.stored(), set(task.anatomy.head_names())
    for name, transform in task.transforms.items():
        other = theirs.get(name)
        if not isinstance(transform, Masked) or type(other) is not Masked:
            raise TaskError(
                f"a task cannot start from {earlier.name!r}, whose {name!r} has no mask of its own: start from a "
                "task of method full that borrows nothing"
            )
        transform.start_as(other, task.anatomy.tensor(name))
    with torch.no_grad():
        for name, tensor in task.owned.items():
            if name in stored and name not in head:
                tensor.copy_(stored[name])


def _refuse_shared(head: Any, anatomy: Anatomy, tasks: Mapping[str, Task]) -> None:
    """Raise if training the head module would change another task or the backbone."""
    owners = {"the backbone": anatomy.backbone, **{f"task {name!r}": task for name, task in tasks.items()}}
    for owner, module in owners.items():
        if isinstance(head, nn.Module) and not set(head.parameters()).isdisjoint(module.parameters()):
            raise TaskError(f"the head module has parameters of {owner}: pass a copy, head=copy.deepcopy(...)")


def plain_task(anatomy: Anatomy, name: str, head: HeadKind) -> Task:
    """Return a task that changes nothing: the backbone with its own head ("keep") or without one ("none")."""
    return Task(Metadata(name, "classifier", {}, head), anatomy, {}, {}, None)


def loaded_task(
    anatomy: Anatomy,
    tasks: Mapping[str, Task],
    filed: archive.Archive,
    fingerprint: str,
    head: nn.Module | None,
    path: str | Path,
) -> Task:
    """Return the task in a file, for the backbone with this fingerprint. It may build on `tasks`."""
    if filed.backbone != fingerprint:
        raise WrongBackboneError(
            f"{path} belongs to a backbone with fingerprint {filed.backbone[:12]}, this one has {fingerprint[:12]}: "
            "build the backbone with the weights that the task was trained on"
        )
    earlier = dependencies.find(filed.metadata, tasks)
    filed = archive.rename_dependencies(filed, [task.name for task in earlier])
    task = restore.restore_task(filed, anatomy, [task.transforms for task in earlier], head)
    task.earlier = tuple(earlier)
    dependencies.freeze(earlier)
    return task

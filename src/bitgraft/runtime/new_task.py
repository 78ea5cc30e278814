"""How a task that is ready to learn is put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.errors import WrongBackboneError
from bitgraft.format import archive, dependencies, restore
from bitgraft.format.metadata import Metadata
from bitgraft.methods import registry
from bitgraft.methods.preset_options import preset_options
from bitgraft.runtime import heads
from bitgraft.task import Task


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
    """A task as `Network.add_task` describes it; `tasks` are those that it may build on."""
    recipe = registry.get(method)
    chosen = recipe.with_options({**preset_options(preset, method), **options})
    rng = torch.Generator().manual_seed(seed)
    first = dependencies.get_earlier(recipe, tasks, start) if start is not None else None
    before = dependencies.choose(recipe, tasks, borrow)
    transforms = registry.transforms(recipe, anatomy, chosen, rng, [task.transforms for task in before])
    owned = registry.owned(recipe, anatomy, chosen)
    kind, names, tensors, module = heads.plan_head(anatomy, classes, head, rng)
    stated = heads.stated_preprocessing(anatomy.backbone) if preprocessing is None else preprocessing
    metadata = Metadata(
        name=name,
        method=method,
        options=registry.plain(chosen),
        head=kind,
        classes=names,
        preprocessing=dict(stated),
        depends_on={task.name: dependencies.content_hash(task) for task in before},
    )
    task = Task(metadata, anatomy, transforms, {**owned, **tensors}, module)
    task.preset = preset or "default"
    if first is not None:
        task.start_from(first)
    dependencies.freeze(before)
    return task


def original_task(anatomy: Anatomy, name: str) -> Task:
    """The backbone as it is, under a name."""
    return Task(Metadata(name, "classifier", {}, "keep"), anatomy, {}, {}, None)


def loaded_task(
    anatomy: Anatomy,
    tasks: Mapping[str, Task],
    filed: archive.Archive,
    fingerprint: str,
    head: nn.Module | None,
    path: str | Path,
) -> Task:
    """The task that a file holds, on the backbone with this fingerprint; `tasks` are those that it may build on."""
    if filed.backbone != fingerprint:
        whose = f"{path} belongs to a backbone with fingerprint {filed.backbone[:12]}, this one has {fingerprint[:12]}"
        raise WrongBackboneError(f"{whose}: build the backbone with the weights that the task was made for")
    before = dependencies.find(filed.metadata, tasks)
    filed = archive.rename_dependencies(filed, [task.name for task in before])
    task = restore.restore_task(filed, anatomy, [task.transforms for task in before], head)
    dependencies.freeze(before)
    return task


def trainable_parameters(module: nn.Module) -> tuple[int, int]:
    """How many parameters learn, and how many there are."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(count for count, learns in counts if learns), sum(count for count, _ in counts)

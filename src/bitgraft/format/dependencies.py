"""The earlier tasks that a task depends on (PackNet's predecessor, those it borrows masks from), known by content.

Names may change, content may not: a content hash covers the hashes of what that task depends on in its turn, so no two
tasks can depend on each other.
"""

from collections.abc import Iterable, Mapping, Sequence

from bitgraft.errors import MissingTaskError, TaskError, UnknownTaskError
from bitgraft.format import archive
from bitgraft.format.metadata import Metadata
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.shared_masks import own_mask

Tasks = Mapping[str, Task]


def chosen(method: registry.Method, tasks: Tasks, borrow: Sequence[str]) -> list[Task]:
    """What a new task depends on: the last of a chain, or the tasks that it names."""
    names = [borrow] if isinstance(borrow, str) else list(borrow)
    earlier = [named(method, tasks, name) for name in names]
    if method.depends_on_previous:
        return [task for task in tasks.values() if task.metadata.method == method.name][-1:]
    for task in earlier:
        if not _has_masks(task):
            raise TaskError(f"task {task.name!r} is of method {task.metadata.method!r}, which has no masks to borrow")
    digests = list(map(fingerprint, earlier))
    if twice := [name for name, digest in zip(names, digests, strict=True) if digests.count(digest) > 1]:
        raise TaskError(f"borrow={names} has the same masks more than once ({', '.join(twice)}): name them once")
    return earlier


def hold(earlier: Iterable[Task]) -> None:
    """Freeze what another task depends on from now on."""
    for task in earlier:
        masks = map(own_mask, task.transforms.values())
        if task.learns() or any(mask is not None and mask.packed is None for mask in masks):
            task.freeze()


def named(method: registry.Method, tasks: Tasks, name: str) -> Task:
    """An earlier task whose masks a task of this method is to take."""
    if not method.borrows:
        able = ", ".join(other for other in registry.method_names() if registry.get(other).borrows)
        raise TaskError(f"method {method.name!r} takes no masks of earlier tasks; {able} does")
    if name not in tasks:
        known = ", ".join(map(repr, tasks)) or "none yet"
        raise UnknownTaskError(f"there is no task {name!r} to take masks from; added are {known}: load it first")
    return tasks[name]


def fingerprint(task: Task) -> str:
    return archive.content(archive.pack_task(task, ""))


def found(metadata: Metadata, tasks: Tasks) -> list[Task]:
    """The tasks that a file depends on, known by their content; the name that each had then is where to look first."""
    there = {name: _find(metadata, tasks, name, digest) for name, digest in metadata.depends_on.items()}
    missing = [name for name, task in there.items() if task is None]
    if other := [name for name in missing if name in tasks]:
        raise MissingTaskError(f"task {metadata.name!r} builds on another task {other[0]!r} than the one that is here")
    if missing:
        names = ", ".join(map(repr, missing))
        raise MissingTaskError(f"task {metadata.name!r} builds on {names}, not here under any name: load that first")
    return [task for task in there.values() if task is not None]


def refuse_removal(name: str, tasks: Iterable[Task]) -> None:
    dependents = [other.name for other in tasks if name in other.metadata.depends_on]
    if dependents:
        raise TaskError(f"task {name!r} cannot be removed: {', '.join(map(repr, dependents))} would not run without it")


def _find(metadata: Metadata, tasks: Tasks, name: str, digest: str) -> Task | None:
    chain = registry.get(metadata.method).depends_on_previous
    able = [t for t in tasks.values() if (t.metadata.method == metadata.method if chain else _has_masks(t))]
    ordered = sorted(able, key=lambda task: task.name != name)
    return next((task for task in ordered if fingerprint(task) == digest), None)


def _has_masks(task: Task) -> bool:
    return any(own_mask(transform) is not None for transform in task.transforms.values())

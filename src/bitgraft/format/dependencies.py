"""The earlier tasks that a task depends on: PackNet's predecessor, or the tasks whose masks it borrows.

A dependency is identified by its content hash, not its name. The hash covers the task's own dependencies, so there are
no cycles.
"""

from collections.abc import Iterable, Mapping, Sequence

from bitgraft.errors import MissingTaskError, TaskError, UnknownTaskError
from bitgraft.format import archive
from bitgraft.format.metadata import Metadata
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.masked import Masked

Tasks = Mapping[str, Task]


def choose(method: registry.Method, tasks: Tasks, borrow: Sequence[str]) -> list[Task]:
    """Return the dependencies of a new task: the last one of its chain, or those named by `borrow`."""
    names = [borrow] if isinstance(borrow, str) else list(borrow)
    earlier = [get_earlier(method, tasks, name) for name in names]
    if method.depends_on_previous:
        return [task for task in tasks.values() if task.metadata.method == method.name][-1:]
    for task in earlier:
        if not _has_masks(task):
            raise TaskError(f"task {task.name!r} has method {task.metadata.method!r}, which has no masks to borrow")
    digests = list(map(content_hash, earlier))
    if twice := [name for name, digest in zip(names, digests, strict=True) if digests.count(digest) > 1]:
        raise TaskError(f"borrow={names} has the same masks more than once ({', '.join(twice)}): name them once")
    return earlier


def freeze(earlier: Iterable[Task]) -> None:
    """Freeze tasks that another task depends on."""
    for task in earlier:
        if task.learns() or any(isinstance(t, Masked) and t.packed is None for t in task.transforms.values()):
            task.freeze()


def get_earlier(method: registry.Method, tasks: Tasks, name: str) -> Task:
    """Return an earlier task, if a task of this method can use its masks."""
    if not method.borrows:
        able = ", ".join(other for other in registry.method_names() if registry.get(other).borrows)
        raise TaskError(f"method {method.name!r} cannot use masks of earlier tasks: use {able}")
    if name not in tasks:
        known = ", ".join(map(repr, tasks)) or "none yet"
        raise UnknownTaskError(f"there is no task {name!r} to take masks from (known: {known}): load it first")
    return tasks[name]


def content_hash(task: Task) -> str:
    return archive.content_hash(archive.pack_task(task, ""))


def find(metadata: Metadata, tasks: Tasks) -> list[Task]:
    """Return a task's dependencies, found by content hash."""
    found = {name: _find(metadata, tasks, name, digest) for name, digest in metadata.depends_on.items()}
    missing = [name for name, task in found.items() if task is None]
    if other := [name for name in missing if name in tasks]:
        raise MissingTaskError(f"task {metadata.name!r} builds on another task {other[0]!r} than the one loaded here")
    if missing:
        names = ", ".join(map(repr, missing))
        raise MissingTaskError(f"task {metadata.name!r} builds on {names}, not here under any name: load that first")
    return [task for task in found.values() if task is not None]


def refuse_removal(name: str, tasks: Iterable[Task]) -> None:
    dependents = [other.name for other in tasks if name in other.metadata.depends_on]
    if dependents:
        raise TaskError(f"task {name!r} cannot be removed: {', '.join(map(repr, dependents))} would not run without it")


def _find(metadata: Metadata, tasks: Tasks, name: str, digest: str) -> Task | None:
    chain = registry.get(metadata.method).depends_on_previous
    able = [t for t in tasks.values() if (t.metadata.method == metadata.method if chain else _has_masks(t))]
    likely_first = sorted(able, key=lambda task: task.name != name)
    return next((task for task in likely_first if content_hash(task) == digest), None)


def _has_masks(task: Task) -> bool:
    return any(isinstance(transform, Masked) for transform in task.transforms.values())

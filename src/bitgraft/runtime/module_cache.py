"""Modules of the tasks that run: a bounded cache, pinned modules, and spare ones for tasks that do not fit."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from bitgraft.errors import TaskError
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task


class ModuleCache:
    """An LRU cache of at most `count` modules with at most `memory` bytes of computed weights.

    The module requested last is kept in any case. Pinned modules stay until they are dropped, and do not count. The
    cache has no lock of its own: the network calls it with its lock held.
    """

    def __init__(self, count: int, memory: int | None = None) -> None:
        if count < 1:
            raise TaskError(f"active={count!r}: at least one task must be kept in memory")
        self.count, self.memory = count, memory
        self.spare = SpareModules()
        self._pinned: dict[str, TaskModule] = {}
        self._cached: OrderedDict[tuple[str, int], tuple[TaskModule, int]] = OrderedDict()

    @property
    def names(self) -> set[str]:
        """The tasks that have a module."""
        return {name for name, _ in self._cached} | self._pinned.keys()

    def get(self, task: Task) -> TaskModule:
        """Return the task's module, and create it if there is none.

        A task that learns has one per thread: gradients reach the tensors that a call started with, whatever other
        threads run in the meantime.
        """
        if task.name in self._pinned:
            return self._pinned[task.name]
        grad = torch.is_grad_enabled()
        key = (task.name, threading.get_ident() if grad and task.learns() else int(grad))
        if key not in self._cached:
            size = computed_bytes(task)
            self.spare.free()
            self._make_room(size)
            self._cached[key] = TaskModule(task), size
        self._cached.move_to_end(key)
        return self._cached[key][0]

    def pin(self, task: Task) -> TaskModule:
        """Return a module that stays the task's only one from now on."""
        if task.name not in self._pinned:
            self._pinned[task.name] = TaskModule(task).pin()
        return self._pinned[task.name]

    def drop(self, name: str) -> None:
        """Drop the modules of one task."""
        self._pinned.pop(name, None)
        for key in [key for key in self._cached if key[0] == name]:
            del self._cached[key]

    def clear(self) -> None:
        """Drop all modules except pinned ones."""
        self._cached.clear()
        self.spare = SpareModules()

    def spills(self, task: Task, batch: Iterable[Task]) -> bool:
        """Return whether a task must run in a spare module because its batch does not fit. If so, make room for it."""
        evaluates = not task.training and not torch.is_grad_enabled()  # gradients need the weights after the call
        if not evaluates or not differs_in_tensors_only(task) or task.name in self.names:
            return False
        if self._fits([computed_bytes(other) for other in batch]):
            return False
        self._make_room(computed_bytes(task))
        return True

    def _make_room(self, size: int) -> None:
        """Drop the least recently used modules until one more of this size fits."""
        while self._cached and not self._fits([*(held for _, held in self._cached.values()), size]):
            self._cached.popitem(last=False)

    def _fits(self, sizes: list[int]) -> bool:
        return len(sizes) <= self.count and (self.memory is None or sum(sizes) <= self.memory)


class SpareModules:
    """Modules that run tasks in turn, each task in the memory of the one before. Every batch in flight has its own.

    They keep their memory until a task enters the cache.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[TaskModule] = []

    @contextmanager
    def lend(self, task: Task) -> Iterator[TaskModule]:
        """Lend a module for one batch. If all are in use, make one, first of all for this task."""
        with self._lock:
            spare = self._idle.pop() if self._idle else None
        spare = spare or TaskModule(task)
        try:
            yield spare
        finally:
            with self._lock:
                self._idle.append(spare)

    def free(self) -> None:
        """Free the memory of the modules that no batch is using."""
        with self._lock:
            for spare in self._idle:
                spare.free_weights()


def differs_in_tensors_only(task: Task) -> bool:
    """Return whether the task adds no modules of its own, such as an adapter or a head module."""
    return task.metadata.head == "classes" and all(t.tail is None for t in task.transforms.values())


def computed_bytes(task: Task) -> int:
    """Return the size of the task's computed weights. Tensors that it owns outright are in memory anyway."""
    return sum(task.anatomy.tensor(name).nbytes for name in task.transforms)

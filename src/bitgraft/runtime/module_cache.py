"""Tasks that keep their computed weights, and spare modules for those that do not."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from bitgraft.errors import TaskError
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task

Key = tuple[str, int]
"""A task's name, and what else tells its modules apart."""


class ModuleCache:
    """At most `count` modules with at most `memory` bytes of computed weights, but always the one last asked for.

    The least recently used one goes first.
    """

    def __init__(self, count: int, memory: int | None = None) -> None:
        if count < 1:
            raise TaskError(f"active={count!r}: at least one task must be kept at work")
        self.count, self.memory = count, memory
        self.spare = SpareModules()
        self._held: OrderedDict[Key, tuple[TaskModule, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def get(self, key: Key, task: Task) -> TaskModule:
        """The task's module, made if it is not here."""
        if key not in self._held:
            size = computed_bytes(task)
            self.spare.free()
            self.make_room(size)
            self._held[key] = TaskModule(task), size
        self._held.move_to_end(key)
        return self._held[key][0]

    def make_room(self, size: int) -> None:
        """Drop modules until one more of this size fits, before its weights are computed."""
        while self._held and not self._fits([*self._sizes(), size]):
            self._held.popitem(last=False)

    def can_keep(self, tasks: Iterable[Task]) -> bool:
        """There is room for all of these at once."""
        return self._fits([computed_bytes(task) for task in tasks])

    def drop(self, name: str) -> None:
        """Forget the modules of the task of that name."""
        for key in [key for key in self._held if key[0] == name]:
            del self._held[key]

    def _sizes(self) -> list[int]:
        return [size for _, size in self._held.values()]

    def _fits(self, sizes: list[int]) -> bool:
        return len(sizes) <= self.count and (self.memory is None or sum(sizes) <= self.memory)


class SpareModules:
    """One spare module for each batch that runs at the same time. Their memory stays for the next batches, until a
    task is to be kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SpareModule] = []

    @contextmanager
    def lend(self) -> Iterator["SpareModule | None"]:
        """A spare module for the time of a batch; None if it is of no use because there are gradients."""
        if torch.is_grad_enabled():
            yield None
            return
        with self._lock:
            spare = self._idle.pop() if self._idle else SpareModule()
        try:
            yield spare
        finally:
            with self._lock:
                self._idle.append(spare)

    def free(self) -> None:
        """Give the memory back, but of those in which batches are running."""
        with self._lock:
            for spare in self._idle:
                spare.free()


class SpareModule:
    """A module tree in which tasks that are not kept run one after another, each in the memory of the one before.

    For evaluation without gradients only: nothing may look at a weight after the call.
    """

    def __init__(self) -> None:
        self._module: TaskModule | None = None

    def free(self) -> None:
        if self._module is not None:
            self._module.free_weights()

    def takes(self, task: Task) -> bool:
        return differs_in_tensors_only(task) and not task.training

    def ready(self, task: Task) -> TaskModule:
        """The module, made to run this task."""
        if self._module is None:
            self._module = TaskModule(task)
        self._module.switch_to(task)
        self._module.refresh()
        return self._module


def differs_in_tensors_only(task: Task) -> bool:
    """From others of its kind: no module of its own takes part."""
    return task.metadata.head == "classes" and all(t.tail is None for t in task.transforms.values())


def computed_bytes(task: Task) -> int:
    """What a task's computed weights take. Tensors that it owns outright are there anyway."""
    weights = [task.anatomy.tensor(name) for name in task.transforms]
    return sum(weight.numel() * weight.element_size() for weight in weights)

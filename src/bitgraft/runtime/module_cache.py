"""Tasks that keep their computed weights, the least recently used of which goes first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from bitgraft.errors import TaskError
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task

Key = tuple[str, int]
"""A task's name, and what else tells its modules apart."""


class ModuleCache:
    """At most `count` of them, and at most `memory` bytes of computed weights, though always the one last asked for."""

    def __init__(self, count: int, memory: int | None = None) -> None:
        if count < 1:
            raise TaskError(f"active={count!r}: at least one task must be kept at work")
        self.count, self.memory = count, memory
        self.bytes = 0
        self._held: OrderedDict[Key, tuple[TaskModule, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def get(self, key: Key, task: Task) -> TaskModule:
        """The task's task_module, made if it is not here; others make room for it before its weights are computed."""
        if key not in self._held:
            size = computed_bytes(task)
            while self._held and not self._fits(size):
                self.bytes -= self._held.popitem(last=False)[1][1]
            self._held[key] = TaskModule(task).attach_hooks(), size
            self.bytes += size
        self._held.move_to_end(key)
        return self._held[key][0]

    def can_keep(self, tasks: Iterable[Task]) -> bool:
        """There is room for all of these at once."""
        sizes = [computed_bytes(task) for task in tasks]
        return len(sizes) <= self.count and (self.memory is None or sum(sizes) <= self.memory)

    def _fits(self, size: int) -> bool:
        return len(self._held) < self.count and (self.memory is None or self.bytes + size <= self.memory)

    def drop(self, which: Callable[[Key], bool] = lambda key: True) -> None:
        for key in [key for key in self._held if which(key)]:
            self.bytes -= self._held.pop(key)[1]


def computed_bytes(task: Task) -> int:
    """What a task's computed weights take. Tensors that it owns outright are there anyway."""
    weights = [task.anatomy.tensor(name) for name in task.transforms]
    return sum(weight.numel() * weight.element_size() for weight in weights)

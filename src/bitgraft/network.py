"""A backbone and its tasks."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import read_anatomy
from bitgraft.backbone.files import check_name
from bitgraft.backbone.tracing import logits
from bitgraft.backbone.weight_files import write_weights
from bitgraft.errors import TaskError, UnknownTaskError
from bitgraft.format import archive, dependencies
from bitgraft.runtime import grouping
from bitgraft.runtime.eager import eager, eager_frame
from bitgraft.runtime.fingerprint import Fingerprint
from bitgraft.runtime.identify import decision
from bitgraft.runtime.module_cache import ModuleCache
from bitgraft.runtime.new_task import loaded_task, new_task, plain_task
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task, dotless, dotted


class Network(nn.Module):
    """A frozen backbone, and tasks that replace some of its tensors while they run.

        net = Network(timm.create_model("resnet50", pretrained=True))
        net.add_task("flowers", classes=102)
        net(images, task="flowers")

    Args:
        backbone: any module. It is analysed once and never modified.
        original: the name of the task that is the unmodified backbone.
        active: how many tasks keep their computed weights in memory. The others take only the memory of their bits.
        memory: a limit in bytes on those weights. At least one task keeps its weights in any case.
        **anatomy_options: passed to `bitgraft.backbone.anatomy.read_anatomy`, to override what it detects.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        original: str = "original",
        active: int = 8,
        memory: int | None = None,
        **anatomy_options: Any,
    ) -> None:
        super().__init__()
        self.anatomy = read_anatomy(backbone, **anatomy_options)
        self._options = {"original": original, "active": active, "memory": memory, **anatomy_options}
        self.backbone, self.original, self.active, self.memory = backbone, check_name(original), active, memory
        self._tasks = nn.ModuleDict()
        self._original = plain_task(self.anatomy, original, "keep")
        self.joint = False  # True while the weights that tasks share may be trained (`joint_copy`)
        self._fingerprint = Fingerprint(self.anatomy)
        self._init_runtime()
        self.train(backbone.training)

    def _init_runtime(self) -> None:
        """Create the state that is neither copied nor pickled."""
        self._module_cache = ModuleCache(self.active, self.memory)
        self._lock = threading.RLock()
        self._identifier = decision.Identifier(self.anatomy)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name, without the original one."""
        with self._lock:
            return MappingProxyType({dotted(key): task for key, task in self._tasks.items()})  # type: ignore[misc]

    @property
    def resident(self) -> set[str]:
        """The names of the tasks whose computed weights are in memory."""
        with self._lock:
            return self._module_cache.names

    @property
    def fingerprint(self) -> str:
        """A hash of the backbone without its head, by which a task file recognises its backbone.

        It changes when the weights do, but not when `net.half()` rounds them. Writes that torch does not count (through
        `.data`, NumPy or a fused optimizer) go unnoticed if the first element of the tensor stays the same.
        """
        if self.joint:
            self._fingerprint.forget()  # it may train further
        return self._fingerprint.value()

    def joint_copy(self) -> "Network":
        """Return a network without tasks on a copy of the backbone, for methods that train weights shared by tasks."""
        copied = Network(copy.deepcopy(self.backbone), **self._options).train(self.training)
        copied.joint = True
        return copied

    def save_backbone(self, path: str | Path) -> None:
        """Write the backbone's weights to a safetensors file, for `bitgraft train --weights`."""
        write_weights(self.backbone, path)

    @torch.inference_mode(False)
    def add_task(
        self,
        name: str,
        classes: int | Sequence[str] | None = None,
        method: str = "full",
        *,
        head: nn.Module | Literal["auto", "keep"] | None = "auto",
        preset: str | None = "default",
        seed: int = 0,
        preprocessing: Mapping[str, Any] | None = None,
        borrow: Sequence[str] = (),
        start: str | None = None,
        **options: Any,
    ) -> Task:
        """Add a task, ready to be trained.

        Args:
            classes: the number of classes, or their names.
            method: one of `bitgraft.method_names()`.
            head: "auto" gives the backbone's last layer `classes` outputs, "keep" keeps the backbone's own output, a
                module replaces the last layer, and None returns features.
            preset: sets the method's options, and the training settings that `bitgraft.fit` uses. None keeps the
                method's own defaults (`bitgraft methods --json`).
            seed: the only source of randomness in the task's initial state. The order of tasks has no influence.
            preprocessing: stored in the task file. The default is what the backbone states (timm's configuration).
            borrow: earlier tasks whose masks are mixed in (method full). They are frozen, and required from then on.
            start: an earlier task to start from, except for its head (method full). It is not required afterwards.
            **options: the method's options. They override the preset.
        """
        self._check_new(name)
        task = new_task(
            self.anatomy, self.tasks, name, classes, method, head, preset, seed, preprocessing, borrow, start, options
        )
        return self._register(task)

    def remove_task(self, name: str) -> None:
        """Remove a task. Nothing else changes."""
        dependencies.refuse_removal(name, self.tasks.values())
        self._added(name)
        with self._lock:
            del self._tasks[dotless(name)]
            self.release(name)

    def release(self, name: str) -> None:
        """Free a task's computed weights until it runs again."""
        with self._lock:
            self._module_cache.drop(name)

    def limit_memory(self, memory: int | None) -> None:
        """Change the limit on computed weights, in bytes. It applies when the next task is loaded into memory."""
        with self._lock:
            self.memory = self._module_cache.memory = memory

    def save_task(self, name: str, path: str | Path, *, coded: bool = False) -> None:
        """Write a task to one file, atomically. With `coded`, masks are entropy-coded: smaller, but slower to load."""
        archive.save(archive.pack_task(self._added(name), self.fingerprint), path, coded=coded)

    @torch.inference_mode(False)
    def load_task(self, path: str | Path, *, name: str | None = None, head: nn.Module | None = None) -> Task:
        """Add the task in a file, ready to run. A file that does not fit changes nothing.

        `name` renames the task. If it was added with a head module, pass a module of the same kind as `head`.
        """
        filed = archive.read_archive(path)
        filed = filed if name is None else archive.rename(filed, name)
        self._check_new(filed.metadata.name)
        return self._register(loaded_task(self.anatomy, self.tasks, filed, self.fingerprint, head, path))

    def export(self, task: str | None = None) -> nn.Module:
        """Return the task as an ordinary module of the backbone's class with plain weights, in evaluation mode."""
        return TaskModule(self._find(task)).plain()

    def module(self, task: str | None = None) -> nn.Module:
        """Return the module that runs a task, to register hooks on or to compile. It follows changes of the task.

        From then on the network runs this task only in this module, so use it in one thread at a time.
        """
        with self._lock:
            task_module = self._module_cache.pin(self._find(task))
        task_module.refresh()
        return task_module.module

    def forward(self, *inputs: Any, task: str | Sequence[str] | None = None, **named: Any) -> Any:
        """Run a batch through one task, or, given a list of names, each image through its own task.

        The task may also be the second positional argument: `net(images, "flowers")`. One task returns what the
        backbone returns, a list of names returns a list with one tensor of logits per image, and "auto" identifies each
        image's task and returns `union_scores`. All other arguments are passed to the backbone.
        """
        if task is None and len(inputs) > 1 and grouping.names_tasks(inputs[1]):
            task, inputs = inputs[1], (inputs[0], *inputs[2:])
        if isinstance(task, str) or not isinstance(task, Iterable):
            if task == "auto" and task not in self.tasks:
                return self.union_scores(inputs[0])
            return self.ready(task)(*inputs, **named)
        return self._forward_mixed(list(task), inputs, named)

    @eager_frame
    def _forward_mixed(self, tasks: list[str], inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
        groups, outputs = grouping.rows_by_task(tasks, inputs, named), dict[int, Tensor]()
        with self._module_cache.spare.lend(self._original) as spare:
            for name, rows in groups.items():
                own = [grouping.select(value, rows, len(tasks)) for value in inputs]
                more = {key: grouping.select(value, rows, len(tasks)) for key, value in named.items()}
                outputs |= zip(rows, logits(self.ready(name, groups, spare)(*own, **more)), strict=True)
        return [outputs[row] for row in range(len(tasks))]

    @eager
    def ready(self, name: str | None, batch: Iterable[str] = (), spare: TaskModule | None = None) -> TaskModule:
        """Return the module that runs a task, up to date: the spare one if the tasks of a mixed batch do not fit."""
        with self._lock:
            cache, task, others = self._module_cache, self._find(name), [self._find(other) for other in batch]
            task_module = spare.switch_to(task) if spare and cache.spills(task, others) else cache.get(task)
        if not task_module.pinned:  # a pinned module refreshes itself at each call
            task_module.refresh()
        return task_module

    def identify(self, images: Tensor | Mapping[str, Tensor]) -> decision.Identified:
        """Find each image's task, or None if the image resembles no task.

        One pass of the plain backbone ranks the tasks, and the best few are run. Only tasks with a description take
        part (`bitgraft describe`). If tasks preprocess images differently, pass one batch per task name.
        """
        tasks = self.tasks
        by_task = dict.fromkeys(tasks, images) if isinstance(images, Tensor) else images
        return self._identifier.decide(tasks, by_task, lambda name, batch: logits(self(batch, task=name)))

    def union_scores(self, images: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return log-probabilities of `classes()`, (N, classes). Rows of unknown images are minus infinity."""
        return decision.union_scores(self.identify(images), self.tasks, known_only=True)

    def classes(self) -> list[tuple[str, str]]:
        """Return the classes of all tasks that have a description, as (task, class), sorted by task."""
        return decision.union(self.tasks)

    def features(self, images: Tensor) -> Tensor:
        """Return what the plain backbone sees in images, at several depths, l2-normalised, (N, features)."""
        return self._identifier.features(images)

    def _find(self, name: str | None) -> Task:
        return self._original if name is None or name == self.original else self._added(name)

    def _added(self, name: str) -> Task:
        if name == self.original:
            raise TaskError(f"{name!r} is the backbone's own task, which has no file and cannot be removed")
        key = dotless(name) if isinstance(name, str) else ""
        if key not in self._tasks:
            known, own = ", ".join(map(repr, self.tasks)) or "none yet", self.original
            raise UnknownTaskError(f"there is no task {name!r}; added are {known}; the backbone's own is {own!r}")
        return self._tasks[key]  # type: ignore[return-value]

    def _check_new(self, name: str) -> None:
        if check_name(name) == self.original:
            raise TaskError(f"{name!r} is the backbone's own task: choose another name")
        if dotless(name) in self._tasks:
            raise TaskError(f"there is a task {name!r} already: remove it first, or choose another name")

    def _register(self, task: Task) -> Task:
        with self._lock:
            self._check_new(task.name)
            self._tasks[dotless(task.name)] = task.train(self.training)
        return task

    def train(self, mode: bool = True) -> "Network":
        """Set the mode of every task. The backbone's own mode does not change."""
        self.training = mode
        for task in [self._original, *self.tasks.values()]:
            task.train(mode)
        return self

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters. The backbone's are detached, so `requires_grad` selects those that tasks learn."""
        own = set() if self.joint else set(self.backbone.parameters())
        for name, parameter in super().named_parameters(*args, **options):
            yield name, nn.Parameter(parameter.detach(), requires_grad=False) if parameter in own else parameter

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, as PEFT does. Each score R counts, though a file stores one bit."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.parameters()]
        total, learned = sum(size for size, _ in sizes), sum(size for size, requires_grad in sizes if requires_grad)
        print(f"trainable params: {learned:,d} || all params: {total:,d} || trainable%: {100 * learned / total:.4f}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Network":
        blank = torch.empty(0, dtype=self.anatomy.dtype)
        with self._fingerprint.carried(rounds=fn(blank).dtype != blank.dtype):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with self._lock:
            self._module_cache.clear()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_module_cache", "_lock", "_identifier"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._init_runtime()

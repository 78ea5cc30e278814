"""One backbone and its tasks."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import read_anatomy
from bitgraft.backbone.tracing import logits
from bitgraft.backbone.weight_files import write_weights
from bitgraft.errors import TaskError, UnknownTaskError
from bitgraft.format import archive, dependencies
from bitgraft.runtime import grouping
from bitgraft.runtime.fingerprint import Fingerprint
from bitgraft.runtime.identify.decision import Identifier
from bitgraft.runtime.identify.methods import Identifying
from bitgraft.runtime.module_cache import ModuleCache, SpareModule, computed_bytes
from bitgraft.runtime.new_task import loaded_task, new_task, original_task, trainable_parameters
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task, check_name, dotless, dotted


class Network(Identifying, nn.Module):
    """A frozen backbone, and tasks that replace some of its tensors while they run.

        net = Network(timm.create_model("resnet50", pretrained=True))
        net.add_task("flowers", classes=102)
        net(images, task="flowers")

    Args:
        backbone: any module; it is read once and never written to.
        original: the name under which the backbone's own task runs.
        active: how many tasks keep their computed weights at a time; the rest cost what their bits take.
        memory: how many bytes these may take; one task is kept in any case.
        **reading: what `bitgraft.backbone.anatomy.read_anatomy` takes, to override what it finds.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        original: str = "original",
        active: int = 8,
        memory: int | None = None,
        **reading: Any,
    ) -> None:
        super().__init__()
        self.anatomy = read_anatomy(backbone, **reading)
        self._options = {"original": original, "active": active, "memory": memory, **reading}
        self.backbone, self.original = backbone, check_name(original)
        self.active, self.memory = active, memory
        self._tasks = nn.ModuleDict()
        self._original = original_task(self.anatomy, original)
        self.joint = False  # the weights that tasks share may learn: of a `joint_copy`, until it is trained
        self._fingerprint = Fingerprint(self.anatomy)
        self._begin()
        self.train(backbone.training)

    def _begin(self) -> None:
        """Set up what is not copied or pickled along with a network."""
        self._modules_at_work = ModuleCache(self.active, self.memory)
        self._pinned: dict[str, TaskModule] = {}
        self._lock = threading.RLock()
        self._identifier = Identifier(self.anatomy)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks added or loaded, by name; the backbone's own is not among them."""
        with self._lock:
            return MappingProxyType({dotted(key): task for key, task in self._tasks.items()})  # type: ignore[misc]

    @property
    def resident(self) -> set[str]:
        """The tasks whose computed weights are in memory."""
        with self._lock:
            return {name for name, _ in self._modules_at_work} | set(self._pinned)

    @property
    def fingerprint(self) -> str:
        """What a task file knows its backbone by: a hash over everything but the head.

        It follows writes to the weights, and stays through rounding (`net.half()`). A write that torch does not count
        (through `.data`, NumPy or a fused optimizer) goes unnoticed if it leaves a tensor's first element as it was.
        """
        if self.joint:
            self._fingerprint.forget()  # it may learn further
        return self._fingerprint.value()

    def joint_copy(self) -> "Network":
        """A network with a backbone of its own and no tasks yet, for methods that train what tasks share.

        Training them jointly makes it another backbone, with another fingerprint; this network stays as it is.
        """
        copied = Network(copy.deepcopy(self.backbone), **self._options).train(self.training)
        copied.joint = True
        return copied

    def save_backbone(self, path: str | Path) -> None:
        """Write the backbone's weights to one safetensors file, as `bitgraft train --weights` takes it."""
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
        """Add a task that is ready to learn.

        Args:
            classes: how many, or their names.
            method: one of `bitgraft.method_names()`.
            head: "auto" gives the backbone's last layer `classes` outputs; "keep" leaves the backbone's output as it
                is; a module takes the last layer's place; None gives features.
            preset: gives the method's options and, in `bitgraft.fit`, the settings of training, as `bitgraft train
                --preset` does; None leaves the method its own options (`bitgraft methods --json`).
            seed: what the task starts from depends on this alone, not on the order of tasks.
            preprocessing: stored in the file; by default what the backbone states (timm's configuration).
            borrow: earlier tasks whose masks are mixed in (method full); they are frozen, and needed from then on.
            start: an earlier task to begin as, head apart (method full); it is not needed afterwards.
            **options: of the method, in place of the preset's.
        """
        self._check_new(name)
        task = new_task(
            self.anatomy, self.tasks, name, classes, method, head, preset, seed, preprocessing, borrow, start, options
        )
        return self._keep(task)

    def remove_task(self, name: str) -> None:
        """Forget a task. Nothing else changes."""
        dependencies.refuse_removal(name, self.tasks.values())
        self._added(name)
        with self._lock:
            del self._tasks[dotless(name)]
            self.release(name)

    def release(self, name: str) -> None:
        """Drop a task's computed weights, until it runs again."""
        with self._lock:
            self._pinned.pop(name, None)
            self._modules_at_work.drop(name)

    def limit_memory(self, memory: int | None) -> None:
        """Change how many bytes computed weights may take, from the next task on that is made ready."""
        with self._lock:
            self.memory = self._modules_at_work.memory = memory

    def save_task(self, name: str, path: str | Path, *, coded: bool = False) -> None:
        """Write a task to one file, whole or not at all; coded, masks take about their entropy and longer to load."""
        archive.save(archive.pack_task(self._added(name), self.fingerprint), path, coded=coded)

    @torch.inference_mode(False)
    def load_task(self, path: str | Path, *, name: str | None = None, head: nn.Module | None = None) -> Task:
        """Add the task in a file, ready to run. A file that does not fit changes nothing.

        Args:
            name: to call it otherwise than it was saved.
            head: a module for the weights of the head, where the task was added with one.
        """
        filed = archive.read_archive(path)
        filed = filed if name is None else archive.rename(filed, name)
        self._check_new(filed.metadata.name)
        return self._keep(loaded_task(self.anatomy, self.tasks, filed, self.fingerprint, head, path))

    def export(self, task: str | None = None) -> nn.Module:
        """The task as an ordinary module of the backbone's own class, with plain weights, in evaluation mode."""
        return TaskModule(self._find(task)).plain()

    def module(self, task: str | None = None) -> nn.Module:
        """The module that runs a task, for hooks and for compiling; it follows the task at each call.

        From then on the network runs this task in this one module, so let one thread at a time learn or run it.
        """
        with self._lock:
            found = self._find(task)
            if found.name not in self._pinned:
                self._pinned[found.name] = TaskModule(found).pin()
            task_module = self._pinned[found.name]
        task_module.refresh()
        return task_module.module

    def forward(self, *inputs: Any, task: str | Sequence[str] | None = None, **named: Any) -> Any:
        """Run one task on a batch, or, given one name per image, each image's own.

        Inputs are the backbone's, by position or by name. The task may also come second: `net(images, "flowers")`.
        One task gives what the backbone gives; a list of names gives a list with one tensor of scores per image.
        "auto" finds each image's task, and gives log-probabilities of `classes()`, minus infinity for unknown images.
        """
        if task is None and len(inputs) > 1 and grouping.names_tasks(inputs[1]):
            task, inputs = inputs[1], (inputs[0], *inputs[2:])
        if task == "auto" and task not in self.tasks:
            return self.union_scores(inputs[0])
        if task is None or isinstance(task, str):
            return self.ready(task)(*inputs, **named)
        return self._mixed(list(task), inputs, named)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call,untyped-decorator]
    def _mixed(self, tasks: list[str], inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
        groups, outputs = grouping.by_task(tasks, inputs, named), []
        with self._modules_at_work.spare.lend() as spare:
            for name, group in groups.items():
                outputs.append(logits(self._module_for(name, groups, spare)(*group.inputs, **group.named)))
        return grouping.in_order(groups.values(), outputs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _module_for(self, name: str, batch: Iterable[str], spare: SpareModule | None) -> Any:
        """The module that runs a task in a batch of several: the spare one if not all of them can keep their own."""
        with self._lock:
            tasks = {other: self._find(other) for other in batch}
            kept = name in self.resident or self._modules_at_work.can_keep(tasks.values())
            if kept or spare is None or not spare.takes(tasks[name]):
                return self.ready(name)
            self._modules_at_work.make_room(computed_bytes(tasks[name]))
        return spare.ready(tasks[name])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def ready(self, name: str | None) -> TaskModule:
        """The module that runs a task, up to date. What learns has one of its own, and so has each thread that learns:
        gradients go to the tensors that the call began with, whatever runs meanwhile."""
        with self._lock:
            task = self._find(name)
            if task.name in self._pinned:
                return self._pinned[task.name]
            grad = torch.is_grad_enabled()
            key = (task.name, threading.get_ident() if grad and task.learns() else int(grad))
            task_module = self._modules_at_work.get(key, task)
        task_module.refresh()
        return task_module

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
        check_name(name)
        if dotless(name) in self._tasks or name == self.original:
            raise TaskError(f"there is a task {name!r} already: remove it first, or choose another name")

    def _keep(self, task: Task) -> Task:
        with self._lock:
            self._check_new(task.name)
            self._tasks[dotless(task.name)] = task.train(self.training)
        return task

    def train(self, mode: bool = True) -> "Network":
        """Set the mode of every task; the backbone keeps its own."""
        self.training = mode
        for task in [self._original, *self.tasks.values()]:
            task.train(mode)
        return self

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, with the backbone's out of gradients' reach: whoever filters by `requires_grad` gets what
        the tasks learn. `net.backbone.parameters()` are the backbone's own tensors, whose flags never change."""
        own = set() if self.joint else set(self.backbone.parameters())
        for name, parameter in super().named_parameters(*args, **options):
            yield name, nn.Parameter(parameter.detach(), requires_grad=False) if parameter in own else parameter

    def print_trainable_parameters(self) -> None:
        """Print how many parameters learn, as PEFT does. R, of which a task file keeps one bit, counts as one each."""
        learned, every = trainable_parameters(self)
        print(f"trainable params: {learned:,d} || all params: {every:,d} || trainable%: {100 * learned / every:.4f}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Network":
        blank = torch.empty(0, dtype=self.anatomy.dtype)
        with self._fingerprint.carried(rounds=fn(blank).dtype != blank.dtype):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with self._lock:
            self._modules_at_work = ModuleCache(self.active, self.memory)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_modules_at_work", "_pinned", "_lock", "_identifier"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()

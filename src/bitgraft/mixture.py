"""Several tasks in one pass over the backbone: at each layer one task after another, each on its own images.

A layer's weights are computed for one task, used, and overwritten by the next task's: they hardly leave the processor's
cache, and at no time is more than one layer of one task there. So a batch over many tasks needs the memory of one
network, of its largest layer and of the tasks' bits.
"""

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from bitgraft.anatomy import Anatomy
from bitgraft.graft import held, slots
from bitgraft.task import Task
from bitgraft.tracing import logits, private_copy

LARGE = 3 * 96 * 96
"""Elements of an image from which on its task's own images are all that the processor's cache has room for: tasks then
run one after another, still with one layer's weights at a time."""


class UnevenError(Exception):
    """The backbone does not keep images apart along the first dimension: tasks must run one by one."""


class Part:
    """What one task puts in the place of the backbone's tensors."""

    def __init__(self, task: Task) -> None:
        self.revision, self.transforms = task.revision, task.transforms
        self.owned = {name: held(task.anatomy.tensor(name), tensor) for name, tensor in task.owned.items()}
        tails = ((name, transform.tail) for name, transform in self.transforms.items())
        self._tails = {name: tail for name, tail in tails if tail is not None}

    def replaces(self, name: str) -> bool:
        return name in self.transforms or name in self.owned

    def tensor(self, name: str, model: Tensor, room: Tensor) -> Tensor:
        transform = self.transforms.get(name)
        if transform is not None:
            return held(model, transform.at_rest(model.detach(), room))
        owned = self.owned.get(name, model)
        return owned if owned.dtype == model.dtype else held(model, owned.to(model.dtype))

    def tail(self, names: Sequence[str]) -> nn.Module | None:
        return next((self._tails[name] for name in names if name in self._tails), None) if self._tails else None


class Mixture:
    """A module tree of the backbone's in which each layer runs every task's images with that task's tensors."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._lock = threading.Lock()  # it is one module tree
        self._uneven = False
        self._known: WeakKeyDictionary[Task, Part] = WeakKeyDictionary()
        self._parts: list[Part] = []
        self._images: list[int] = []
        self._base: dict[str, Tensor] = {}
        self._widths: list[int | None] = []
        with torch.inference_mode(False):
            self._module = private_copy(anatomy.backbone).eval()
            self._slots = slots(self._module, anatomy)
        self._names: dict[str, list[str]] = {}
        for name, places in anatomy.places.items():
            for path, _ in places:
                self._names.setdefault(path, []).append(name)
        self._layers = {path for path in self._names if not any(o.startswith(f"{path}.") for o in self._names) and path}
        self._forwards: dict[str, Callable[..., Tensor]] = {
            path: self._module.get_submodule(path).forward for path in self._layers
        }
        for path in self._layers:
            self._module.get_submodule(path).forward = partial(self._run, path)
        self._next = _norms_behind(anatomy, self._layers)
        self._normed: dict[str, Tensor] = {}  # what norm layers will be given, which has been through them
        self._spots = {path: _side_by_side(anatomy, self._names[path]) for path in self._layers}
        with torch.inference_mode(False):
            ends = [spot.stop for spots in self._spots.values() for spot in spots.values()]
            self._room = torch.empty(max(ends, default=0))

    def scores(
        self, images: Tensor, tasks: Sequence[tuple[Task, Sequence[int]]], *args: Any, **kwargs: Any
    ) -> list[Tensor] | None:
        """Scores of each task's rows of the batch; None where it is another thread's now or cannot run these tasks."""
        if self._uneven or not self._takes([task for task, _ in tasks]) or not self._lock.acquire(blocking=False):
            return None
        try:
            if images[0].numel() > LARGE:
                return [self(images[list(rows)], [(task, len(rows))], *args, **kwargs)[0] for task, rows in tasks]
            ordered = images[[row for _, rows in tasks for row in rows]]
            return self(ordered, [(task, len(rows)) for task, rows in tasks], *args, **kwargs)
        except UnevenError:
            self._uneven = True
            return None
        finally:
            self._lock.release()

    def _takes(self, tasks: Sequence[Task]) -> bool:
        """Nothing learns, and what is replaced lies in layers that take one tensor and give one."""
        device = self.anatomy.tensor(next(iter(self.anatomy.places))).device.type
        if torch.is_grad_enabled() or (is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return False
        return all(
            not task.training
            and task.card.head in ("classes", "keep")
            and all(path in self._layers for name in _replaced(task) for path, _ in self.anatomy.places[name])
            for task in tasks
        )

    def __call__(self, images: Tensor, tasks: Sequence[tuple[Task, int]], *args: Any, **kwargs: Any) -> list[Tensor]:
        """Scores of each task's images, which stand one task after another in the batch."""
        self._parts, self._images = [self._part(task) for task, _ in tasks], [count for _, count in tasks]
        self._base = self.anatomy.tensors()
        self._widths = [None] * len(tasks)
        self._install(self._base)
        try:
            scores = logits(self._module(images, *args, **kwargs))
        finally:
            self._parts, self._base, left, self._normed = [], {}, self._normed, {}
        if left:
            raise UnevenError
        wide = torch.split(scores, self._images)
        return [part[:, :width] for part, width in zip(wide, self._widths, strict=True)]

    def _part(self, task: Task) -> Part:
        known = self._known.get(task)
        if known is None or known.revision != task.revision:
            known = self._known[task] = Part(task)
        return known

    def _run(self, path: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._normed and self._is_normed(path, x):
            return x
        total, stages = sum(self._images), self._stages(path)
        if not stages:
            return self._forwards[path](x, *args, **kwargs)
        if args or kwargs or len(x) != total or (x.dim() == 3 and x.shape[1] == total):  # which of the two are images?
            raise UnevenError
        outputs = [
            self._through(stages, part, images)
            for part, images in zip(self._parts, torch.split(x, self._images), strict=True)
        ]
        self._install({name: self._base[name] for stage in stages for name in self._names[stage]})
        if path != self.anatomy.head:
            output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
            if len(stages) > 1:
                self._normed[stages[1]] = output
            return output
        if outputs[0].dim() == 3:
            raise UnevenError
        self._widths = [output.shape[1] for output in outputs]
        return _padded(outputs, max(output.shape[1] for output in outputs))

    def _is_normed(self, path: str, x: Tensor) -> bool:
        """A norm layer gets what has been through it already. Whoever else gets that should not."""
        ahead = self._normed.pop(path, None)
        if ahead is x:
            return True
        if ahead is not None or any(x is other for other in self._normed.values()):
            raise UnevenError
        return False

    def _stages(self, path: str) -> list[str]:
        """A layer whose tensors some task replaces, and the norm layer behind it if some task replaces that one's:
        between the two images need not be put together and taken apart again. None where the layer stays as it is."""
        if not self._is_replaced(path):
            return []
        behind = self._next.get(path)
        return [path] if behind is None or not self._is_replaced(behind) else [path, behind]

    def _is_replaced(self, path: str) -> bool:
        return any(part.replaces(name) for part in self._parts for name in self._names[path])

    def _through(self, stages: Sequence[str], part: Part, images: Tensor) -> Tensor:
        for stage in stages:
            names, spots = self._names[stage], self._spots[stage]
            self._install({name: part.tensor(name, self._base[name], self._room[spots[name]]) for name in names})
            images, tail = self._forwards[stage](images), part.tail(names)
            images = images if tail is None else tail(images)
        return images

    def _install(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for holder, key in self._slots[name]:
                holder[key] = tensor


def _side_by_side(anatomy: Anatomy, names: Sequence[str]) -> dict[str, slice]:
    """A stretch of one memory for each of a layer's tensors, none for those that no mask takes."""
    sizes = [anatomy.weights[name].shape.numel() if name in anatomy.weights else 0 for name in names]
    ends = list(accumulate(sizes))
    return {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}


def _norms_behind(anatomy: Anatomy, layers: AbstractSet[str]) -> dict[str, str]:
    """The norm layer that takes a layer's output and nothing else, where both run once in a pass."""
    behind: dict[str, str] = {}
    for name, weight in anatomy.weights.items():
        paths = [path for path, _ in anatomy.places[name]]
        if weight.feeds in layers and len(paths) == 1 and paths[0] in layers:
            behind[paths[0]] = str(weight.feeds)
    return behind


def _replaced(task: Task) -> set[str]:
    return {*task.transforms, *task.owned}


def _padded(outputs: list[Tensor], width: int) -> Tensor:
    """One batch again. Heads differ in width: the narrower ones get columns that nobody reads."""
    wide = outputs[0].new_zeros(sum(map(len, outputs)), width, *outputs[0].shape[2:])
    for rows, output in zip(torch.split(wide, [len(output) for output in outputs]), outputs, strict=True):
        rows[:, : output.shape[1]] = output
    return wide

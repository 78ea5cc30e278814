"""Several tasks in one pass over the backbone: at each layer one task after another, each on its own images.

A layer's weights are computed for one task, used, and overwritten by the next task's: they hardly leave the processor's
cache, and at no time is more than one layer of one task there. So a batch over many tasks needs the memory of one
network, of its largest layer and of the tasks' bits.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.tracing import logits, private_copy
from bitgraft.runtime.task_module import held, slots
from bitgraft.task import Task
from bitgraft.transforms.masked import one_by_one

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
        self.tails = {name: tail for name, tail in tails if tail is not None}


class Turn:
    """One task's part in a batch. What can be prepared is before the first layer runs: between layers that is slow,
    since they leave nothing else in the processor's cache."""

    def __init__(
        self, part: Part, rows: Sequence[int], base: Mapping[str, Tensor], rooms: Mapping[str, Tensor]
    ) -> None:
        self.rows, self._base, self._rooms, self._tails = rows, base, rooms, part.tails
        self.owned = {name: _rounded(base[name], tensor) for name, tensor in part.owned.items()}
        self.weights = one_by_one(part.transforms, {name: base[name].detach() for name in part.transforms}, rooms)

    def tensor(self, name: str) -> Tensor:
        if name not in self.weights:
            return self.owned.get(name, self._base[name])
        found = self.weights[name]()
        return found if found is self._rooms[name] else held(self._base[name], found)

    def tail(self, names: Sequence[str]) -> nn.Module | None:
        return next((self._tails[name] for name in names if name in self._tails), None) if self._tails else None


class Mixture:
    """A module tree of the backbone's in which each layer runs every task's images with that task's tensors."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._lock = threading.Lock()  # it is one module tree
        self._uneven = False
        self._known: WeakKeyDictionary[Task, Part] = WeakKeyDictionary()
        self._turns: list[Turn] = []
        self._replaced: AbstractSet[str] = frozenset()
        self._ran: set[str] = set()
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
        with torch.inference_mode(False):
            self._rooms = _shared_rooms(anatomy, [self._names[path] for path in self._layers])

    def scores(
        self, images: Tensor, tasks: Sequence[tuple[Task, Sequence[int]]], *args: Any, **kwargs: Any
    ) -> list[Tensor] | None:
        """Scores of each task's rows of the batch; None where it is another thread's now or cannot run these tasks."""
        if self._uneven or not self._takes([task for task, _ in tasks]) or not self._lock.acquire(blocking=False):
            return None
        try:
            base = self.anatomy.tensors()
            rooms = {name: held(base[name], room) for name, room in self._rooms.items()}
            turns = (Turn(self._part(task), rows, base, rooms) for task, rows in tasks)
            if images[0].numel() > LARGE:
                return [self._pass(base, images, [turn], *args, **kwargs)[0] for turn in turns]
            return self._pass(base, images, list(turns), *args, **kwargs)
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
            and task.metadata.head in ("classes", "keep")
            and all(path in self._layers for name in _replaced(task) for path, _ in self.anatomy.places[name])
            for task in tasks
        )

    def _pass(
        self, base: Mapping[str, Tensor], images: Tensor, turns: list[Turn], *args: Any, **kwargs: Any
    ) -> list[Tensor]:
        """Scores of each task's images, which go through the backbone one task's after another's."""
        self._turns, self._widths, self._ran = turns, [None] * len(turns), set()
        self._replaced = {name for turn in turns for names in (turn.owned, turn.weights) for name in names}
        self._install({**base, **turns[0].owned} if len(turns) == 1 else base)
        try:
            ordered = images[[row for turn in turns for row in turn.rows]]
            scores = logits(self._module(ordered, *args, **kwargs))
        finally:
            self._turns, left, self._normed = [], self._normed, {}
            self._install(base)
        if left or any(self._is_replaced(path) for path in self._layers - self._ran):  # someone else read its tensors
            raise UnevenError
        wide = torch.split(scores, [len(turn.rows) for turn in turns])
        return [part[:, :width] for part, width in zip(wide, self._widths, strict=True)]

    def _part(self, task: Task) -> Part:
        known = self._known.get(task)
        if known is None or known.revision != task.revision:
            known = self._known[task] = Part(task)
        return known

    def _run(self, path: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._normed and self._is_normed(path, x):
            return x
        stages, sizes = self._stages(path), [len(turn.rows) for turn in self._turns]
        self._ran.update(stages)
        if not stages:
            return self._forwards[path](x, *args, **kwargs)
        total = sum(sizes)
        if args or kwargs or len(x) != total or (x.dim() == 3 and x.shape[1] == total):  # which of the two are images?
            raise UnevenError
        outputs = [
            self._through(stages, turn, images) for turn, images in zip(self._turns, torch.split(x, sizes), strict=True)
        ]
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
        return not self._replaced.isdisjoint(self._names[path])

    def _through(self, stages: Sequence[str], turn: Turn, images: Tensor) -> Tensor:
        alone = len(self._turns) == 1  # then all is in its place but weights that are to be computed
        for stage in stages:
            names = self._names[stage]
            self._install({name: turn.tensor(name) for name in names if name in turn.weights or not alone})
            images, tail = self._forwards[stage](images), turn.tail(names)
            images = images if tail is None else tail(images)
        return images

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for holder, key in self._slots[name]:
                holder[key] = tensor


def _shared_rooms(anatomy: Anatomy, layers: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Memory for each weight that a mask can take: side by side for those of one layer, the same for all layers."""
    spots: dict[str, slice] = {}
    for names in layers:
        end = 0
        for name in names:
            if name in anatomy.weights:
                begin, end = end, end + anatomy.weights[name].shape.numel()
                spots[name] = slice(begin, end)
    memory = torch.empty(max((spot.stop for spot in spots.values()), default=0))
    return {name: memory[spot].view(anatomy.weights[name].shape) for name, spot in spots.items()}


def _rounded(model: Tensor, owned: Tensor) -> Tensor:
    """In the backbone's dtype."""
    return owned if owned.dtype == model.dtype else held(model, owned.to(model.dtype))


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

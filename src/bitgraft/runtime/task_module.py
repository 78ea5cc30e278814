"""A task at work: a private copy of the backbone's module tree that shares its tensors and holds the task's.

The backbone itself is never touched, not even for the time of a call. So threads cannot meet in it, and whatever
reads a weight after the call (activation checkpointing, for one) still finds the task's.
"""

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy, tensor_dict
from bitgraft.backbone.layers import is_norm
from bitgraft.backbone.tracing import private_copy
from bitgraft.runtime.heads import Headed, as_graph, place_head
from bitgraft.runtime.snapshot import Snapshot
from bitgraft.task import Task

Slot = tuple[Any, str | int]
"""A dict or list, and the key under which it holds a tensor."""


class TaskModule:
    """One task in one module tree. Residual adapters, and a head behind the backbone, run as forward hooks."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._lock = threading.Lock()
        self._pinned = False
        self._mode: tuple[Any, ...] = ()
        self._grad = False
        self._backbone = Snapshot([])
        self._sources: list[Tensor] = []
        self._computed: tuple[int, Snapshot] | None = None
        self._buffers: dict[str, Tensor] = {}
        with torch.inference_mode(False):  # tensors made in inference mode would be of no use to learning later
            self.module = private_copy(task.anatomy.backbone)
            self._slots = _slots(self.module, task.anatomy)
            self._norms = [(p, m) for p, m in self.module.named_modules() if is_norm(m) and m._buffers]
            self._behind = place_head(self.module, task)
        added = _tails(self.module, task) + ([(self.module, self._behind)] if self._behind is not None else [])
        self._hooks = [
            layer.register_forward_hook(lambda layer, args, output, tail=tail: tail(output)) for layer, tail in added
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def pin(self) -> "TaskModule":
        """Let the module follow the task whoever calls it."""
        self.module.register_forward_pre_hook(lambda layer, args: self.refresh())
        self._pinned = True
        return self

    def switch_to(self, task: Task) -> None:
        """Run another task from now on, which differs in tensors alone. Its weights go where the last one's are."""
        if _replaced(task) != _replaced(self.task):
            self._mode = ()  # the backbone's own tensors go elsewhere
        self.task, self._sources, self._computed = task, task.sources(), None
        place_head(self.module, task)
        with torch.inference_mode(False):
            for name in task.transforms.keys() - self._buffers.keys():
                self._buffers[name] = torch.empty_like(task.anatomy.tensor(name), requires_grad=False)

    def free_weights(self) -> None:
        """Drop the computed weights, until they are asked for again."""
        self._mode, self._buffers = (), {}
        self._install(dict.fromkeys(self.task.transforms))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(self) -> None:
        """Make the module run the task as it is now: with gradients where something learns, else computed once."""
        with self._lock:
            self._follow()
            task = self.task
            if torch.is_grad_enabled() and task.learns():
                self._computed = None
                task.train_forwards += 1
                self._install(dict.fromkeys(task.transforms))  # there is room for this step's in the same memory
                self._install(weights := task.tensors())
                if not self._pinned:
                    self._drop_after_backward(weights)
            elif not self._is_computed():
                with torch.inference_mode(False), torch.no_grad():
                    tensors = task.tensors(out=self._buffers)
                    self._install({name: self._as_held(name, tensor) for name, tensor in tensors.items()})
                self._computed = task.train_forwards, Snapshot(self._sources)

    def plain(self) -> nn.Module:
        """An ordinary module with weights of its own and nothing of bitgraft in it, in evaluation mode.

        What it is made of is used up: this object cannot run the task any more.
        """
        for hook in self._hooks:
            hook.remove()
        with torch.inference_mode(False), torch.no_grad():
            self.refresh()
            for layer, tail in _tails(self.module, self.task):
                _replace(self.module, layer, as_graph(_Tailed(layer, tail)))
            whole = self.module if self._behind is None else nn.Sequential(self.module, self._behind)
            for headed in [module for module in whole.modules() if isinstance(module, Headed)]:
                _replace(whole, headed, headed.ordinary(self.task.anatomy.dtype))
            return copy.deepcopy(whole).eval()

    def _follow(self) -> None:
        """Notice a change of mode, tensors exchanged for others, and a backbone that was moved or written to."""
        task, backbone = self.task, self.task.anatomy.tensors()
        mode = (task.training, task.holds_statistics, torch.is_grad_enabled(), task.revision)
        if self._mode == mode and self._backbone.matches(backbone.values()):
            return
        self._grad = torch.is_grad_enabled()
        self.module.train(task.training)
        owned = set() if task.holds_statistics else set(task.owned)
        for path, norm in self._norms:
            if not any(f"{path}.{name}" in owned for name in norm._buffers):  # nothing may move its statistics
                norm.training = False  # the layer alone: dropout below it follows the mode
        with torch.inference_mode(False):
            if task.training:
                task.match_statistics()
            self._share(backbone)
        self._mode = (*mode[:-1], task.revision)
        self._backbone, self._sources, self._computed = Snapshot(backbone.values()), task.sources(), None

    def _share(self, backbone: Mapping[str, Tensor]) -> None:
        """What the task does not replace: the backbone's parameters out of gradients' reach, copies of its buffers."""
        replaced = _replaced(self.task)
        for name, tensor in backbone.items():
            if name not in replaced:
                own = tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
                self._install({name: self._as_held(name, own)})

    def _is_computed(self) -> bool:
        if self._computed is None:
            return False
        train_forwards, sources = self._computed
        return train_forwards == self.task.train_forwards and sources.matches(self._sources)

    def _install(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            for holder, key in self._slots[name]:
                holder[key] = tensor

    def _as_held(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as modules hold it in the place of the backbone's, out of gradients' reach.

        Without gradients it asks for them as the backbone's does: torch.matmul looks at that flag to choose between two
        ways of computing, and the results differ in the last bit.
        """
        model = self.task.anatomy.tensor(name)
        if not isinstance(model, nn.Parameter):
            return tensor
        asks = model.requires_grad and not self._grad and not tensor.is_inference()
        return nn.Parameter(tensor.detach(), requires_grad=asks)

    def _drop_after_backward(self, tensors: Mapping[str, Tensor]) -> None:
        """Let go of each weight as soon as its gradient is whole: that takes its place in memory. Nobody sees this
        module but the network, which computes weights anew before it runs it again."""
        for name in self.task.transforms:
            if (tensor := tensors[name]).requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(_drop, self._slots[name], weakref.ref(tensor)))  # type: ignore[no-untyped-call]


def _replaced(task: Task) -> set[str]:
    """The backbone's tensors in whose place the task has others."""
    return {*task.owned, *task.transforms}


def _drop(places: list[Slot], before: "weakref.ref[Tensor]", grad: Tensor) -> None:
    """Empty the slots, unless a later step has put something else there."""
    for holder, key in places:
        if holder[key] is not None and holder[key] is before():
            holder[key] = None


def _slots(module: nn.Module, anatomy: Anatomy) -> dict[str, list[Slot]]:
    """Where each of the backbone's tensors is held in a copy of its module tree."""
    return {
        name: [slot for path, attribute in places for slot in _holders(module.get_submodule(path), attribute)]
        for name, places in anatomy.places.items()
    }


def _holders(owner: nn.Module, attribute: str) -> Iterator[Slot]:
    yield tensor_dict(owner, attribute), attribute
    if isinstance(owner, nn.RNNBase) and attribute in owner._flat_weights_names:  # it keeps a second list of them
        yield owner._flat_weights, owner._flat_weights_names.index(attribute)


def _tails(module: nn.Module, task: Task) -> list[tuple[nn.Module, nn.Module]]:
    paths = [(name.rpartition(".")[0], transform.tail) for name, transform in task.transforms.items()]
    return [(module.get_submodule(path), tail) for path, tail in paths if tail is not None]


class _Tailed(nn.Module):
    def __init__(self, layer: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.layer, self.tail = layer, tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layer(x))  # type: ignore[no-any-return]


def _replace(tree: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for path, module in list(tree.named_modules(remove_duplicate=False)):
        if module is old:
            tree.set_submodule(path, new)

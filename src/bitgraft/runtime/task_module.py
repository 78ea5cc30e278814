"""The module that runs a task: a copy of the backbone's module tree that shares all tensors but the task's own.

The backbone is never modified, not even during a call. So threads do not interfere, and code that reads a weight after
the call, such as activation checkpointing, still finds the task's.
"""

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitgraft.backbone.anatomy import Anatomy, tensor_dict
from bitgraft.backbone.layers import is_norm
from bitgraft.backbone.tracing import private_copy
from bitgraft.runtime.eager import eager
from bitgraft.runtime.heads import Headed, place_head
from bitgraft.runtime.snapshot import Snapshot
from bitgraft.task import Task

Slot = tuple[Any, str | int]
"""A dict or list, and the key under which it holds a tensor."""


class TaskModule:
    """One task in one module tree. Series adapters and a head on top of the features run as forward hooks."""

    @eager
    def __init__(self, task: Task) -> None:
        self.task = task
        self._lock = threading.Lock()
        self.pinned = False
        self._mode: tuple[Any, ...] = ()
        self._grad = False
        self._backbone = Snapshot([])
        self._computed: tuple[int, list[Tensor], Snapshot] | None = None  # what the weights were computed from
        self._buffers: dict[str, Tensor] = {}
        self._forwards = weakref.WeakSet[_Forward]()
        with torch.inference_mode(False):  # tensors created in inference mode could not be trained later
            self.module = private_copy(task.anatomy.backbone)
            self._slots = _slots(self.module, task.anatomy)
            self._norms = [(p, m) for p, m in self.module.named_modules() if is_norm(m) and m._buffers]
            self._top = place_head(self.module, task)
        added = _tails(self.module, task) + ([(self.module, self._top)] if self._top is not None else [])
        self._hooks = [
            layer.register_forward_hook(lambda layer, args, output, tail=tail: tail(output)) for layer, tail in added
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def pin(self) -> "TaskModule":
        """Refresh the module before each call, so that anyone may call it."""
        self.module.register_forward_pre_hook(lambda layer, args: self.refresh())
        self.pinned = True
        return self

    def switch_to(self, task: Task) -> "TaskModule":
        """Run another task that differs only in tensors. Its weights reuse the memory of the previous one's."""
        if _replaced(task) != _replaced(self.task):
            self._mode = ()  # share the backbone's tensors again
        self.task, self._computed = task, None
        place_head(self.module, task)
        with torch.inference_mode(False):
            for name in task.transforms.keys() - self._buffers.keys():
                self._buffers[name] = torch.empty_like(task.anatomy.tensor(name), requires_grad=False)
        return self

    def free_weights(self) -> None:
        """Free the computed weights until the next refresh."""
        self._mode, self._buffers = (), {}
        self._install(dict.fromkeys(self.task.transforms))

    @eager
    def refresh(self) -> None:
        """Bring the module up to date with the task.

        Weights of a task that learns are computed at each call, with gradients. Others are computed once.
        """
        with self._lock:
            self._sync()
            task = self.task
            if torch.is_grad_enabled() and task.learns():
                self._computed = None
                task.train_forwards += 1
                self._install(dict.fromkeys(task.transforms))  # frees the last step's weights first
                self._install(weights := task.tensors())
                if not self.pinned:
                    self._drop_after_backward(weights)
            elif not self._is_computed():
                with torch.inference_mode(False), torch.no_grad():
                    tensors = task.tensors(out=self._buffers)
                    self._install({name: self._as_held(name, tensor) for name, tensor in tensors.items()})
                sources = task.sources()
                self._computed = task.train_forwards, sources, Snapshot(sources)

    def plain(self) -> nn.Module:
        """Return an ordinary module with its own weights and no bitgraft classes, in evaluation mode.

        It is built from this object, which cannot run the task afterwards.
        """
        for hook in self._hooks:
            hook.remove()
        with torch.inference_mode(False), torch.no_grad():
            self.refresh()
            for layer, tail in _tails(self.module, self.task):
                _replace(self.module, layer, nn.Sequential(layer, fx.symbolic_trace(tail)))
            whole = self.module if self._top is None else nn.Sequential(self.module, self._top)
            for headed in [module for module in whole.modules() if isinstance(module, Headed)]:
                _replace(whole, headed, headed.ordinary(self.task.anatomy.dtype))
            return copy.deepcopy(whole).eval()

    def _sync(self) -> None:
        """Follow changes of mode, replaced task tensors, and a backbone that was moved or written to."""
        task, backbone = self.task, self.task.anatomy.tensors()
        mode = (task.training, task.holds_statistics, torch.is_grad_enabled())
        if self._mode == (*mode, *_revisions(task)) and self._backbone.matches(backbone.values()):
            return
        self._grad = torch.is_grad_enabled()
        self.module.train(task.training)
        owned = set() if task.holds_statistics else set(task.owned)
        for path, norm in self._norms:
            if not any(f"{path}.{name}" in owned for name in norm._buffers):  # its statistics must not change
                norm.training = False  # of this layer only: dropout inside it follows the mode
        with torch.inference_mode(False):
            if task.training:
                task.match_statistics()
            self._share(backbone)
        self._mode = (*mode, *_revisions(task))
        self._backbone, self._computed = Snapshot(backbone.values()), None

    def _share(self, backbone: Mapping[str, Tensor]) -> None:
        """Install what the task does not replace: the backbone's parameters, detached, and copies of its buffers."""
        replaced = _replaced(self.task)
        for name, tensor in backbone.items():
            if name not in replaced:
                own = tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
                self._install({name: self._as_held(name, own)})

    def _is_computed(self) -> bool:
        if self._computed is None:
            return False
        train_forwards, sources, snapshot = self._computed
        return train_forwards == self.task.train_forwards and snapshot.matches(sources)

    def _install(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            for holder, key in self._slots[name]:
                holder[key] = tensor

    def _as_held(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as a module holds it: a detached parameter if the backbone's tensor is a parameter.

        Under no_grad it has the backbone's `requires_grad`. torch.matmul picks one of two algorithms by that flag, and
        their results differ in the last bit.
        """
        original = self.task.anatomy.tensor(name)
        if not isinstance(original, nn.Parameter):
            return tensor
        requires_grad = original.requires_grad and not self._grad and not tensor.is_inference()
        return nn.Parameter(tensor.detach(), requires_grad=requires_grad)

    def _drop_after_backward(self, tensors: Mapping[str, Tensor]) -> None:
        """Free each weight once its gradient is complete, so that the gradient can take its memory. Only the network
        sees this module, and it computes the weights again before the next call.

        A weight stays while another forward pass awaits its gradient, which may be checkpointed and run again.
        """
        computed = {name: tensors[name] for name in self.task.transforms}
        learned = {name: t for name, t in computed.items() if t.requires_grad and not t.is_leaf}
        self._forwards.add(forward := _Forward(set(learned)))

        def drop(name: str, weight: "weakref.ref[Tensor]", grad: Tensor) -> None:
            forward.awaited.discard(name)
            if not any(name in other.awaited for other in self._forwards):
                for holder, key in self._slots[name]:
                    if holder[key] is weight():
                        holder[key] = None

        for name, tensor in learned.items():
            tensor.register_hook(partial(drop, name, weakref.ref(tensor)))  # type: ignore[no-untyped-call]


def _revisions(task: Task) -> list[int]:
    return [one.revision for one in (task, *task.earlier)]


def _replaced(task: Task) -> set[str]:
    """Return the names of the backbone's tensors that the task replaces."""
    return {*task.owned, *task.transforms}


@dataclass(eq=False)
class _Forward:
    """A forward pass with gradients, which lives as long as its graph."""

    awaited: set[str]
    """The weights whose gradients are not complete yet."""


def _slots(module: nn.Module, anatomy: Anatomy) -> dict[str, list[Slot]]:
    """Return where a copy of the backbone's module tree holds each tensor."""
    return {
        name: [slot for path, attribute in places for slot in _slots_of(module.get_submodule(path), attribute)]
        for name, places in anatomy.places.items()
    }


def _slots_of(owner: nn.Module, attribute: str) -> Iterator[Slot]:
    yield tensor_dict(owner, attribute), attribute
    if isinstance(owner, nn.RNNBase) and attribute in owner._flat_weights_names:  # a second list of the weights
        yield owner._flat_weights, owner._flat_weights_names.index(attribute)


def _tails(module: nn.Module, task: Task) -> list[tuple[nn.Module, nn.Module]]:
    paths = [(name.rpartition(".")[0], transform.tail) for name, transform in task.transforms.items()]
    return [(module.get_submodule(path), tail) for path, tail in paths if tail is not None]


def _replace(tree: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for path, module in list(tree.named_modules(remove_duplicate=False)):
        if module is old:
            tree.set_submodule(path, new)

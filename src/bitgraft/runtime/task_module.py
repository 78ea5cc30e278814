"""A task at work: a private copy of the backbone's module tree that shares its tensors and holds the task's.

The backbone itself is never touched, not even for the time of a call. So threads cannot meet in it, and whatever
reads a weight after the call (activation checkpointing, for one) still finds the task's.
"""

import copy
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.layers import is_norm
from bitgraft.backbone.tracing import private_copy
from bitgraft.runtime.heads import Headed, as_graph, place_head
from bitgraft.task import Task

Slot = tuple[Any, str | int]
"""A dict or list, and the key under which it holds a tensor."""


class TaskModule:
    """One task in one module tree."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._lock = threading.Lock()
        self._mode: tuple[bool, bool, bool] | None = None
        self._pinned = False
        self._grad = False
        self._revision = -1
        self._backbone: list[Tensor] = []
        self._base: tuple[Any, ...] = ()
        self._watched: list[Tensor] = []
        self._stamp: tuple[Any, ...] | None = None
        with torch.inference_mode(False):  # tensors made in inference mode would be of no use to learning later
            self.module = private_copy(task.anatomy.backbone)
            self._slots = slots(self.module, task.anatomy)
            self._frozen_norms = {
                holds: _frozen_norms_of(self.module, set() if holds else set(task.owned)) for holds in (False, True)
            }
            self._behind = place_head(self.module, task)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def attach_hooks(self) -> "TaskModule":
        """Run residual adapters, and a head behind the backbone, by hooks, for as long as this task_module lives."""
        for layer, tail in _tails(self.module, self.task):
            layer.register_forward_hook(lambda layer, args, output, tail=tail: tail(output))
        if self._behind is not None:
            self.module.register_forward_hook(lambda layer, args, output, head=self._behind: head(output))
        return self

    def pin(self) -> "TaskModule":
        """Let the module follow the task whoever calls it."""
        self.module.register_forward_pre_hook(lambda layer, args: self.refresh())
        self._pinned = True
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(self) -> None:
        """Make the module run the task as it is now: with gradients where something learns, else computed once."""
        with self._lock:
            self._follow()
            if torch.is_grad_enabled() and self.task.learns():
                self._stamp = None
                self.task.train_forwards += 1
                self._let_go()
                self._install(fresh := self.task.tensors())
                if not self._pinned:
                    self._drop_when_learned(fresh)
            elif (stamp := (self.task.train_forwards, *_versions(self._watched))) != self._stamp:
                with torch.inference_mode(False), torch.no_grad():
                    self._install({name: self._held(name, t) for name, t in self.task.tensors().items()})
                self._stamp = stamp

    def plain(self) -> nn.Module:
        """An ordinary module with weights of its own and nothing of bitgraft in it, in evaluation mode."""
        with torch.inference_mode(False), torch.no_grad():
            self.refresh()
            for layer, tail in _tails(self.module, self.task):
                _replace(self.module, layer, as_graph(_Tailed(layer, tail)))
            whole = self.module if self._behind is None else nn.Sequential(self.module, self._behind)
            for headed in [module for module in whole.modules() if isinstance(module, Headed)]:
                _replace(whole, headed, headed.ordinary(self.task.anatomy.dtype))
            return _by_itself(copy.deepcopy(whole)).eval()

    def _follow(self) -> None:
        """Notice a change of mode, tensors exchanged for others, and a backbone that was moved or written to."""
        task = self.task
        mode = (task.training, task.holds_statistics, torch.is_grad_enabled())
        if self._mode != mode:
            self._mode, self._grad = mode, torch.is_grad_enabled()
            self.module.train(task.training)
            for layer in self._frozen_norms[task.holds_statistics]:
                layer.training = False  # the layer alone: dropout below it follows the mode
            self._revision = -1
        if self._revision != task.revision or self._base != _versions(self._backbone):
            with torch.inference_mode(False):
                if task.training:
                    task.match_statistics()
                self._share()
            self._revision, self._stamp = task.revision, None
            self._watched = [t for t in task.sources() if not t.is_inference()]

    def _share(self) -> None:
        """What the task does not replace: the backbone's parameters out of gradients' reach, copies of its buffers."""
        anatomy, replaced = self.task.anatomy, {*self.task.owned, *self.task.transforms}
        tensors = anatomy.tensors()
        self._backbone = list(tensors.values())
        self._base = _versions(self._backbone)
        for name, tensor in tensors.items():
            if name not in replaced:
                self._install({name: self._held(name, tensor if isinstance(tensor, nn.Parameter) else tensor.clone())})

    def _install(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for holder, key in self._slots[name]:
                holder[key] = tensor

    def _let_go(self) -> None:
        """Drop the last step's weights before this one's are computed: there is room for them in the same memory."""
        for name in self.task.transforms:
            for holder, key in self._slots[name]:
                holder[key] = None

    def _drop_when_learned(self, tensors: dict[str, Tensor]) -> None:
        """Let go of each weight as soon as its gradient is whole: that takes its place in memory. Nobody sees this
        module but the network, which computes weights anew before it runs it again."""
        for name in self.task.transforms:
            if (tensor := tensors[name]).requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(_drop, self._slots[name], weakref.ref(tensor)))  # type: ignore[no-untyped-call]

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        return held(self.task.anatomy.tensor(name), tensor, self._grad)


def _by_itself(module: nn.Module) -> nn.Module:
    """Give each tensor memory of its own: those of a loaded task lie in one stretch, which would go along with any."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone()
    return module


def held(model: Tensor, tensor: Tensor, grad: bool = False) -> Tensor:
    """A tensor as modules hold it in the place of `model`, out of gradients' reach.

    Where there are no gradients, it asks for them as the backbone's does: torch.matmul looks at that flag to choose
    between two ways of computing, and the results differ in the last bit.
    """
    if not isinstance(model, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=model.requires_grad and not grad)


def _drop(places: list[Slot], before: "weakref.ref[Tensor]", grad: Tensor) -> None:
    """Empty the slots, unless a later step has put something else there."""
    for holder, key in places:
        if holder[key] is not None and holder[key] is before():
            holder[key] = None


def slots(module: nn.Module, anatomy: Anatomy) -> dict[str, list[Slot]]:
    """Where each of the backbone's tensors is held in a copy of its module tree."""
    return {
        name: [slot for path, attribute in places for slot in _holders(module.get_submodule(path), attribute)]
        for name, places in anatomy.places.items()
    }


def _holders(owner: nn.Module, attribute: str) -> Iterator[Slot]:
    yield (owner._parameters if attribute in owner._parameters else owner._buffers), attribute
    if isinstance(owner, nn.RNNBase) and attribute in owner._flat_weights_names:  # it keeps a second list of them
        yield owner._flat_weights, owner._flat_weights_names.index(attribute)


def _versions(watched: list[Tensor]) -> tuple[Any, ...]:
    """Changes whenever one of the tensors is written to, or the first of them (so, all) is moved."""
    first = (watched[0].data_ptr(), watched[0].dtype) if watched else ()
    return (*first, *[t._version for t in watched])


def _frozen_norms_of(module: nn.Module, owned: set[str]) -> list[nn.Module]:
    """Norm layers whose statistics are not owned: they stay in evaluation mode, so that nothing moves them."""
    return [
        layer
        for path, layer in module.named_modules()
        if is_norm(layer) and layer._buffers and not any(f"{path}.{name}" in owned for name in layer._buffers)
    ]


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

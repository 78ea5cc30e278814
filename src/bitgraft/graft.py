"""A task at work: a private copy of the backbone's module tree that shares its tensors and holds the task's.

The backbone itself is never touched, not even for the time of a call. So threads cannot meet in it, and whatever
reads a weight after the call (activation checkpointing, for one) still finds the task's.
"""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitgraft.anatomy import Anatomy
from bitgraft.layers import is_norm
from bitgraft.task import Task
from bitgraft.tracing import private_copy

Slot = tuple[dict[str, Tensor | None], str]


class Graft:
    """One task in one module tree."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.module = private_copy(task.anatomy.backbone)
        self.pinned = False
        self._lock = threading.Lock()
        self._slots = _slots(self.module, task.anatomy)
        self._share(set(task.owned))
        self._still = _unowned_statistics(self.module, set(task.owned))
        self._after = _place_head(self.module, task)
        self._mode: bool | None = None
        self._revision = -1
        self._stamp: tuple[Any, ...] | None = None
        self._watched: list[Tensor] = []
        self._learned: list[nn.Parameter] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        return output if self._after is None else self._after(output)

    def hang_tails(self) -> "Graft":
        """Run residual adapters behind their layers, for as long as this graft lives."""
        for _, layer, tail in _tails(self.module, self.task):
            layer.register_forward_hook(lambda layer, args, output, tail=tail: _run_tail(tail, output))
        return self

    def refresh(self) -> None:
        """Make the module run the task as it is now: with gradients where something learns, else computed once."""
        with self._lock:
            self._follow_mode()
            self._follow_revision()
            if torch.is_grad_enabled() and any(p.requires_grad for p in self._learned):
                self._stamp = None
                for name, tensor in self.task.tensors().items():
                    self._install(name, tensor)
            elif (stamp := _stamp(self._watched)) != self._stamp:
                with torch.inference_mode(False), torch.no_grad():
                    for name, tensor in self.task.tensors().items():
                        self._install(name, self._as_held(name, tensor))
                self._stamp = stamp

    def plain(self) -> nn.Module:
        """An ordinary module with weights of its own and nothing of bitgraft in it, in evaluation mode."""
        with torch.no_grad():
            self.refresh()
        for path, layer, tail in _tails(self.module, self.task):
            self.module.set_submodule(path, _with_tail(layer, tail))
        whole = copy.deepcopy(self.module if self._after is None else nn.Sequential(self.module, self._after))
        for parameter in whole.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return whole.eval()

    def _share(self, owned: set[str]) -> None:
        """What the task does not own: the backbone's parameters beyond the reach of gradients, copies of its buffers."""
        anatomy = self.task.anatomy
        for name in anatomy.places:
            if name not in owned:
                tensor = anatomy.tensor(name)
                shared = tensor.detach()
                self._install(name, _held(shared) if isinstance(tensor, nn.Parameter) else shared.clone())

    def _install(self, name: str, tensor: Tensor) -> None:
        for holder, attribute in self._slots[name]:
            holder[attribute] = tensor

    def _as_held(self, name: str, tensor: Tensor) -> Tensor:
        """A computed tensor as modules hold them; the task's own are held as they are."""
        is_parameter = isinstance(self.task.anatomy.tensor(name), nn.Parameter)
        return _held(tensor) if is_parameter and not isinstance(tensor, nn.Parameter) else tensor

    def _follow_mode(self) -> None:
        if self._mode != self.task.training:
            self._mode = self.task.training
            self.module.train(self._mode)
            for layer in self._still:
                layer.eval()

    def _follow_revision(self) -> None:
        if self._revision != self.task.revision:
            self._revision, self._stamp = self.task.revision, None
            self.task.match_statistics()
            self._learned = list(self.task.parameters())
            backbone = [self.task.anatomy.tensor(name) for name in self.task.anatomy.places]
            self._watched = [*backbone, *self._learned, *self.task.transform_buffers()]


def _slots(module: nn.Module, anatomy: Anatomy) -> dict[str, list[Slot]]:
    """Where each of the backbone's tensors is held in a copy of its module tree."""
    slots: dict[str, list[Slot]] = {}
    for name, places in anatomy.places.items():
        for path, attribute in places:
            owner = module.get_submodule(path)
            holder: Any = owner._parameters if attribute in owner._parameters else owner._buffers
            slots.setdefault(name, []).append((holder, attribute))
    return slots


def _held(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _stamp(watched: list[Tensor]) -> tuple[Any, ...]:
    """Changes whenever one of the tensors is written to, or the first of them (so, all) is moved."""
    first = (watched[0].data_ptr(), watched[0].dtype) if watched else ()
    return (*first, *(0 if t.is_inference() else t._version for t in watched))


def _unowned_statistics(module: nn.Module, owned: set[str]) -> list[nn.Module]:
    """Norm layers whose statistics are the backbone's: they stay in evaluation mode, so that nothing moves them."""
    return [
        layer
        for path, layer in module.named_modules()
        if is_norm(layer) and layer._buffers and not any(f"{path}.{name}" in owned for name in layer._buffers)
    ]


def _place_head(module: nn.Module, task: Task) -> nn.Module | None:
    """Give the copy the task's head; returned if it goes behind the module rather than into it."""
    kind, name = task.card.head, task.anatomy.head
    if kind == "classes" and task.classes is not None and name is not None:
        _state_outputs(module, module.get_submodule(name), len(task.classes))
    elif kind == "none" and name is not None:
        module.set_submodule(name, nn.Identity())
    elif kind in ("module", "linear"):
        if name is None:
            return task.head
        assert task.head is not None
        module.set_submodule(name, task.head)
    return None


def _state_outputs(module: nn.Module, head: nn.Module, count: int) -> None:
    """Keep what modules say about their outputs true, for whoever reads it (timm, transformers, exporters)."""
    for owner, attribute in [
        (head, "out_features"),
        (head, "out_channels"),
        (module, "num_classes"),
        (module, "num_labels"),
        (getattr(module, "config", None), "num_labels"),
    ]:
        if isinstance(getattr(owner, attribute, None), int):
            setattr(owner, attribute, count)


def _tails(module: nn.Module, task: Task) -> list[tuple[str, nn.Module, nn.Module]]:
    paths = [(name.rpartition(".")[0], transform.tail) for name, transform in task.transforms.items()]
    return [(path, module.get_submodule(path), tail) for path, tail in paths if tail is not None]


def _run_tail(tail: nn.Module, output: Tensor) -> Tensor:
    adapted: Tensor = tail(output.float())
    return adapted.to(output.dtype)


class _Tailed(nn.Module):
    def __init__(self, layer: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.layer, self.tail = layer, tail

    def forward(self, x: Tensor) -> Tensor:
        return _run_tail(self.tail, self.layer(x))


def _with_tail(layer: nn.Module, tail: nn.Module) -> nn.Module:
    """Layer and adapter as one graph of ordinary modules, which opens where bitgraft is not installed."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, path: str) -> bool:
            return module is layer or super().is_leaf_module(module, path)

    tailed = _Tailed(layer, tail)
    return fx.GraphModule(tailed, Tracer().trace(tailed), class_name="Tailed")

"""Reads a backbone: the weights that a task transforms, its norm layers, its head, and which layer feeds a norm.

There is no list of supported models. Types say what a layer is; one forward pass of a private copy says in what
order layers run, whose output goes straight into a norm, and whose output is the network's own. Whatever is read
can be overridden with the patterns of `fnmatch` (`"layer4.*"`).
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bitgraft.backbone.layers import (
    is_conv,
    is_norm,
    is_transposed,
    undoes_channel_scales,
    undoes_scale,
    weight_attributes,
)
from bitgraft.backbone.tracing import Trace, trace
from bitgraft.errors import BackboneError
from bitgraft.transforms.base import Weight

Patterns = str | Sequence[str]
Places = dict[str, list[tuple[str, str]]]
AUTO = "auto"


@dataclass
class Anatomy:
    """What `read_anatomy` found. `weights` are in the order in which data reaches them."""

    backbone: nn.Module = field(repr=False)
    weights: dict[str, Weight]
    norms: dict[str, tuple[str, ...]]
    """Each norm layer with the names of its tensors, statistics included."""
    head: str | None
    """The layer whose output is the network's output; None for a backbone that gives features."""
    head_known: bool
    """False where no such layer was found and the user has not said either."""
    features: int | None
    """What the head takes in; for a backbone without a head, what it gives out."""
    wrapped: str | None
    """The type of what the backbone gives, where that is not a tensor (transformers)."""
    places: Places = field(repr=False)
    """Each tensor's name -> the (module, attribute) places that hold it; several where weights are tied."""
    outside: tuple[str, ...] = ()
    """Parameters that tasks share untouched: biases, embeddings, scales."""

    def tensor(self, name: str) -> Tensor:
        """The backbone's tensor of that name, as it is now."""
        path, attribute = self.places[name][0]
        return _held(self._owner(path), attribute)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        found: dict[str, Any] = {}
        for path, names in self._by_owner.items():
            owner = self._owner(path)
            parameters, buffers = owner._parameters, owner._buffers
            for name, attribute in names:  # as `_held` does, without a call for each
                tensor = parameters.get(attribute)
                found[name] = tensor if tensor is not None else buffers[attribute]
        return found

    @functools.cached_property
    def _by_owner(self) -> dict[str, list[tuple[str, str]]]:
        """Each module that holds tensors, with their names and attributes there: a tensor's first place."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name, places in self.places.items():
            path, attribute = places[0]
            found.setdefault(path, []).append((name, attribute))
        return found

    def _owner(self, path: str) -> nn.Module:
        owner = self.backbone
        for step in path.split(".") if path else ():  # get_submodule, which is asked thousands of times, is slow
            owner = owner._modules[step]  # type: ignore[assignment]
        return owner

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's floating dtype (of its first parameter that has one)."""
        return next((p.dtype for p in self.backbone.parameters() if p.is_floating_point()), torch.float32)

    def head_names(self) -> list[str]:
        """The names of the head's tensors."""
        return [] if self.head is None else self.under(self.head)

    def under(self, module: str) -> list[str]:
        """The names of all tensors of one layer and below it."""
        prefix = f"{module}."
        return [name for name in self.places if name.startswith(prefix)]

    def fingerprint(self) -> str:
        """SHA-256 over the names, shapes and float32 values of everything but the head, which a task replaces."""
        head, digest = set(self.head_names()), hashlib.sha256()
        for name in sorted(_persistent(self.backbone, self.places)):
            tensor = self.tensor(name)
            if name in head or name.endswith("num_batches_tracked"):
                continue
            if tensor.is_meta:
                raise BackboneError(
                    f"{name!r} has a shape but no values (meta device): load weights before saving tasks"
                )
            value = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None).contiguous()
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_anatomy(
    backbone: nn.Module,
    *,
    example: Tensor | Sequence[int] | None = None,
    transform: Patterns = AUTO,
    skip: Patterns = (),
    norms: Patterns = AUTO,
    head: str | None = AUTO,
    scale_free: Patterns = AUTO,
) -> Anatomy:
    """Read a backbone.

    Args:
        example: a batch to run (or its shape) where the backbone does not say what it takes.
        transform: patterns of the weights that tasks transform; by default those of every convolution, linear layer
            and fused attention projection but the head.
        skip: patterns of weights to leave out of those.
        norms: patterns of the norm layers that a task gets its own copy of; by default all.
        head: the name of the layer that a task replaces, or None for a backbone that gives features.
        scale_free: patterns of the weights whose k0 stays 1; by default those that feed a norm which undoes scales.
    """
    _refuse(backbone)
    places = tensor_places(backbone)
    seen = trace(backbone, example)
    head, head_known = _find_head(backbone, seen) if head == AUTO else (head, True)
    in_head = {name for name in places if head is not None and name.startswith(f"{head}.")}
    if head is not None and not in_head:
        raise BackboneError(f"the backbone has no layer {head!r} with weights to be its head; {_heads_hint(backbone)}")
    every = _by_default(backbone, places) if transform == AUTO else _match(transform, _matrices(backbone), "transform")
    found = [name for name in _in_order(backbone, every, seen) if name not in in_head]
    skipped = set(_match(skip, found, "skip"))
    weights = {name: _describe(backbone, places, name, seen) for name in found if name not in skipped}
    if scale_free != AUTO:
        fixed = set(_match(scale_free, weights, "scale_free"))
        weights = {n: replace(w, scale_free=n in fixed, channels_scale_free=n in fixed) for n, w in weights.items()}
    layers = _norms(backbone, places)
    kept = _match(norms, layers, "norms") if norms != AUTO else list(layers)
    owned = in_head.union(*(layers[name] for name in kept))
    parameters = (name for name, _ in backbone.named_parameters())
    return Anatomy(
        backbone=backbone,
        weights=weights,
        norms={name: layers[name] for name in kept},
        head=head,
        head_known=head_known,
        features=_features(backbone, head, seen),
        wrapped=seen.wrapped,
        places=places,
        outside=tuple(name for name in parameters if name not in owned and name not in weights),
    )


def _held(owner: nn.Module, attribute: str) -> Tensor:
    tensor = owner._parameters.get(attribute)
    return tensor if tensor is not None else owner._buffers[attribute]  # type: ignore[return-value]


def describe(anatomy: Anatomy, name: str) -> Weight:
    """The weight of that name, also when it is not among those transformed by default (a task file may have it)."""
    return anatomy.weights.get(name) or _describe(anatomy.backbone, anatomy.places, name, None)


def _refuse(backbone: nn.Module) -> None:
    if not isinstance(backbone, nn.Module):
        raise BackboneError(
            f"a backbone is a torch.nn.Module, not a {type(backbone).__name__}: build it first, timm.create_model(...)"
        )
    if isinstance(backbone, torch.jit.ScriptModule):
        raise BackboneError(
            "the backbone is a TorchScript module, whose weights cannot be replaced: pass the Python module"
        )
    if hasattr(backbone, "_orig_mod"):
        raise BackboneError("the backbone is already compiled: pass the plain module and compile the Network instead")
    if isinstance(backbone, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise BackboneError("the backbone is wrapped for parallel training: pass `backbone.module`")
    for name, module in backbone.named_modules():
        if hasattr(module, "parametrizations"):
            raise BackboneError(
                f"layer {name!r} computes its weight with a parametrization: "
                "call torch.nn.utils.parametrize.remove_parametrizations on it first"
            )
        if ".quantized" in type(module).__module__:
            raise BackboneError(f"layer {name!r} is quantised: pass the backbone before quantisation")
    for name, tensor in [*backbone.named_parameters(), *backbone.named_buffers()]:
        if is_lazy(tensor):
            raise BackboneError(f"{name!r} is lazy and has no shape yet: run the backbone once on a batch first")


def tensor_places(module: nn.Module) -> Places:
    """Every tensor under its first name, with all places that hold it."""
    first: dict[int, str] = {}
    places: Places = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                name = first.setdefault(id(tensor), _join(path, attribute))
                places.setdefault(name, []).append((path, attribute))
    return places


def _persistent(backbone: nn.Module, places: Iterable[str]) -> list[str]:
    transient = {
        _join(path, name) for path, module in backbone.named_modules() for name in module._non_persistent_buffers_set
    }
    return [name for name in places if name not in transient]


def _by_default(backbone: nn.Module, places: Places) -> list[str]:
    """The weights of convolutions, linear layers and attention."""
    owners = ((path, a) for path, module in backbone.named_modules() for a in weight_attributes(module))
    return [name for path, attribute in owners if (name := _join(path, attribute)) in places]


def _matrices(backbone: nn.Module) -> list[str]:
    return [name for name, parameter in backbone.named_parameters() if parameter.dim() >= 2]


def _in_order(backbone: nn.Module, names: Iterable[str], seen: Trace) -> list[str]:
    """Names in the order in which their layers run; a layer that was never called stands behind its neighbour."""
    order, last = {}, -1
    for path, _ in backbone.named_modules():
        order[path] = last = seen.order.get(path, last)
    return sorted(names, key=lambda name: order[_parent(name)])


def _describe(backbone: nn.Module, places: Places, name: str, seen: Trace | None) -> Weight:
    module = backbone.get_submodule(_parent(name))
    tensor = backbone.get_parameter(name)
    if not tensor.is_floating_point():
        raise BackboneError(
            f"{name!r} is of type {tensor.dtype}, not floating point: pass the backbone before quantisation"
        )
    feeds = [seen.feeds.get(_parent(name)) if seen else None]
    tied = [path for path, _ in places[name][1:] if backbone.get_submodule(path) is not module]
    feeds += [seen.feeds.get(path) if seen else None for path in tied]
    norms = [backbone.get_submodule(path) for path in feeds if path]
    return Weight(
        name=name,
        shape=tensor.shape,
        kind="conv" if is_conv(module) else "transposed" if is_transposed(module) else "linear",
        groups=getattr(module, "groups", 1),
        feeds=feeds[0] if all(feeds) else None,
        scale_free=all(feeds) and all(undoes_scale(module, norm) for norm in norms),
        channels_scale_free=all(feeds) and all(undoes_channel_scales(norm) for norm in norms),
    )


def _norms(backbone: nn.Module, places: Places) -> dict[str, tuple[str, ...]]:
    found = {}
    for path, module in backbone.named_modules():
        if path and is_norm(module):
            names = [f"{path}.{attribute}" for attribute in [*module._parameters, *module._buffers]]
            if owned := tuple(name for name in names if name in places):
                found[path] = owned
    return found


def _find_head(backbone: nn.Module, seen: Trace) -> tuple[str | None, bool]:
    if seen.last is not None:
        return seen.last, True
    return None, getattr(backbone, "num_classes", None) == 0  # how timm marks a backbone that gives features


def _features(backbone: nn.Module, head: str | None, seen: Trace) -> int | None:
    if head is None:
        return seen.width
    weight = getattr(backbone.get_submodule(head), "weight", None)
    return int(weight.shape[1]) if weight is not None and weight.dim() >= 2 else None


def _heads_hint(backbone: nn.Module) -> str:
    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    last = ", ".join(repr(name) for name in linear[-3:])
    return f"its last linear layers are {last}" if last else "it has no linear layer"


def unknown_head(backbone: nn.Module) -> BackboneError:
    return BackboneError(
        f"cannot tell which layer of {type(backbone).__name__} is its classifier ({_heads_hint(backbone)}): "
        "pass its name, Network(backbone, head=...), or head=None if the backbone gives features"
    )


def _match(patterns: Patterns, names: Iterable[str], what: str) -> list[str]:
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    names = list(names)
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BackboneError(f"{what}={pattern!r} matches nothing in the backbone; names look like {names[:3]}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _parent(name: str) -> str:
    return name.rpartition(".")[0]

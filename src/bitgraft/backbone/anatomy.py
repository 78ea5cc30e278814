"""Reads a backbone: the weights that a task transforms, its norm layers, its head, and which layer feeds a norm.

There is no list of supported models. Types say what a layer is; one forward pass of a private copy says in what
order layers run, whose output goes straight into a norm, and whose output is the network's own. Whatever is read
can be overridden with the patterns of `fnmatch` (`"layer4.*"`).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.backbone.checks import refuse, warn_of_shared
from bitgraft.backbone.head_layers import find_heads, heads_hint, named_heads, within
from bitgraft.backbone.layers import (
    COUNTER,
    is_conv,
    is_norm,
    is_transposed,
    undoes_channel_scales,
    undoes_scale,
    weight_attributes,
)
from bitgraft.backbone.tracing import Example, Trace, trace
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
    heads: tuple[str, ...]
    """The layers whose output is the network's output; several where it combines theirs, none if it gives features."""
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

    @property
    def head(self) -> str | tuple[str, ...] | None:
        """The head as `read_anatomy` and task files take it: one name, several, or None."""
        return self.heads if len(self.heads) > 1 else self.heads[0] if self.heads else None

    @cached_property
    def _holders(self) -> dict[str, tuple[dict[str, Any], str]]:
        return {
            name: (tensor_dict(self.backbone.get_submodule(p[0][0]), p[0][1]), p[0][1])
            for name, p in self.places.items()
        }

    def tensor(self, name: str) -> Tensor:
        """The backbone's tensor of that name, as it is now."""
        held, attribute = self._holders[name]
        return held[attribute]  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {name: self.tensor(name) for name in self.places}

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's floating dtype (of its first parameter that has one)."""
        return next((p.dtype for p in self.backbone.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """Where the backbone is (its first tensor)."""
        return self.tensor(next(iter(self.places))).device

    @cached_property
    def _head_names(self) -> list[str]:
        return _held_by(self.heads, self.places)

    def head_names(self) -> list[str]:
        """The names of the tensors that belong to the head alone."""
        return list(self._head_names)

    @cached_property
    def norm_of(self) -> dict[str, str]:
        """Each tensor of a norm layer with that layer's name, also of norms that new tasks leave alone."""
        return {name: path for path, names in _norms(self.backbone, self.places).items() for name in names}

    @cached_property
    def fingerprinted(self) -> list[str]:
        """The tensors that the fingerprint covers: those that a state dict holds, the head's and counters apart."""
        transient = {_join(p, n) for p, m in self.backbone.named_modules() for n in m._non_persistent_buffers_set}
        return sorted(n for n in self.places.keys() - transient - set(self.head_names()) if not n.endswith(COUNTER))

    @property
    def head_tied(self) -> bool:
        """The head holds a tensor that another layer holds as well (language models: the embedding)."""
        return any(len({within(path, self.heads) for path, _ in held}) > 1 for held in self.places.values())

    def fingerprint(self) -> str:
        """SHA-256 over the names, shapes and float32 values of everything but the head, which a task replaces."""
        digest = hashlib.sha256()
        for name in self.fingerprinted:
            tensor = self.tensor(name)
            if tensor.is_meta:
                raise BackboneError(f"{name!r} has no values (meta device): load weights before saving tasks")
            value = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None).contiguous()
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_anatomy(
    backbone: nn.Module,
    *,
    example: Example | None = None,
    transform: Patterns = AUTO,
    skip: Patterns = (),
    norms: Patterns = AUTO,
    head: Patterns | None = AUTO,
    scale_free: Patterns = AUTO,
) -> Anatomy:
    """Read a backbone.

    Args:
        example: a batch to run (a mapping: keyword arguments), or its shape, where the backbone does not say what it
            takes.
        transform: patterns of the weights that tasks transform; by default those of every convolution, linear layer,
            recurrent layer and fused attention projection but the head.
        skip: patterns of weights to leave out of those.
        norms: patterns of the norm layers that a task gets its own copy of; by default all.
        head: the layer that a task replaces, several where the network combines their outputs, or None for a backbone
            that gives features.
        scale_free: patterns of the weights whose k0 stays 1; by default those that feed a norm which undoes scales.
    """
    refuse(backbone)
    places = tensor_places(backbone)
    seen = trace(backbone, example)
    heads = find_heads(backbone, seen) if head == AUTO else named_heads(backbone, seen, head)
    in_head = set(_held_by(heads or (), places))
    matrices = [name for name, parameter in backbone.named_parameters() if parameter.dim() >= 2]
    every = _by_default(backbone, places) if transform == AUTO else _match(transform, matrices, "transform")
    found = [name for name in _in_order(backbone, every, seen) if name not in in_head]
    skipped = set(_match(skip, found, "skip"))
    weights = {name: _describe(backbone, places, name, seen) for name in found if name not in skipped}
    if scale_free != AUTO:
        fixed = set(_match(scale_free, weights, "scale_free"))
        weights = {n: replace(w, scale_free=n in fixed, channels_scale_free=n in fixed) for n, w in weights.items()}
    layers = _norms(backbone, places)
    kept = _match(norms, layers, "norms") if norms != AUTO else list(layers)
    owned = in_head.union(weights, *(layers[name] for name in kept))
    outside = tuple(name for name, _ in backbone.named_parameters() if name not in owned)
    if transform == norms == AUTO and not skip:
        warn_of_shared(backbone, outside)
    return Anatomy(
        backbone=backbone,
        weights=weights,
        norms={name: layers[name] for name in kept},
        heads=heads or (),
        head_known=heads is not None,
        features=_features(backbone, heads or (), seen),
        wrapped=seen.wrapped,
        places=places,
        outside=outside,
    )


def describe(anatomy: Anatomy, name: str) -> Weight:
    """The weight of that name, also when it is not among those transformed by default (a task file may have it)."""
    return anatomy.weights.get(name) or _describe(anatomy.backbone, anatomy.places, name, None)


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


def tensor_dict(owner: nn.Module, attribute: str) -> dict[str, Any]:
    """The dictionary in which a module holds a tensor."""
    return owner._parameters if attribute in owner._parameters else owner._buffers


def _held_by(layers: Sequence[str], places: Places) -> list[str]:
    """The tensors that these layers hold, and no other layer."""
    return [name for name, held in places.items() if all(within(path, layers) for path, _ in held)]


def _by_default(backbone: nn.Module, places: Places) -> list[str]:
    """The weights of convolutions, linear and recurrent layers, and attention."""
    owners = ((path, a) for path, module in backbone.named_modules() for a in weight_attributes(module))
    return [name for path, attribute in owners if (name := _join(path, attribute)) in places]


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
        raise BackboneError(f"{name!r} is of type {tensor.dtype}: pass the backbone before quantisation")
    tied = [path for path, _ in places[name][1:] if backbone.get_submodule(path) is not module]
    feeds = [seen.feeds.get(path) if seen else None for path in [_parent(name), *tied]]
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
    layers = {path: [*m._parameters, *m._buffers] for path, m in backbone.named_modules() if path and is_norm(m)}
    held = {path: tuple(n for a in names if (n := f"{path}.{a}") in places) for path, names in layers.items()}
    return {path: names for path, names in held.items() if names}


def _features(backbone: nn.Module, heads: Sequence[str], seen: Trace) -> int | None:
    if not heads:
        return seen.width
    weight = getattr(backbone.get_submodule(heads[0]), "weight", None)
    return int(weight.shape[1]) if weight is not None and weight.dim() >= 2 else None


def unknown_head(backbone: nn.Module) -> BackboneError:
    return BackboneError(
        f"cannot tell which layer of {type(backbone).__name__} is its classifier ({heads_hint(backbone)}): "
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

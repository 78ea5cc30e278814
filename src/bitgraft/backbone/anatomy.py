"""Finds the weights of a backbone that tasks transform, its norm layers and its head, and which layers feed a norm.

There is no list of supported models. The type of a layer tells what it is. One forward pass of a private copy tells the
order of layers, which of them feed a norm, and which give the network's output. Everything can be overridden with
`fnmatch` patterns such as "layer4.*".
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.backbone.checks import refuse, refuse_bypassed, warn_of_shared
from bitgraft.backbone.head_layers import find_heads, named_heads, within
from bitgraft.backbone.layers import (
    is_conv,
    is_norm,
    is_transposed,
    undoes_channel_scales,
    undoes_scale,
    weight_attributes,
)
from bitgraft.backbone.tracing import Example, Trace, trace
from bitgraft.errors import BackboneError
from bitgraft.transforms.base import COUNTER, Weight

Patterns = str | Sequence[str]
Places = dict[str, list[tuple[str, str]]]
AUTO = "auto"


@dataclass
class Anatomy:
    """The result of `read_anatomy`. `weights` are in the order in which their layers run."""

    backbone: nn.Module = field(repr=False)
    weights: dict[str, Weight]
    norms: dict[str, tuple[str, ...]]
    """Norm layer -> the names of its tensors, statistics included."""
    heads: tuple[str, ...]
    """The layers whose output is the network's output: several if it combines them, none if it returns features."""
    head_known: bool
    """False if no head was found and the user did not name one."""
    features: int | None
    """The number of the head's inputs or, without a head, of the backbone's outputs."""
    wrapped: str | None
    """The type of the backbone's output if it is not a tensor (transformers)."""
    probabilities: bool
    """Whether the output is a softmax, not logits."""
    places: Places = field(repr=False)
    """Tensor -> the (module, attribute) pairs that hold it: several if it is tied."""
    outside: tuple[str, ...] = ()
    """Parameters that tasks use unchanged: biases, embeddings, scales."""

    def __post_init__(self) -> None:
        owners = self.backbone.named_modules(remove_duplicate=False)
        self._tree = [(path, o._modules, name, child) for path, o in owners for name, child in o._modules.items()]

    @property
    def head(self) -> str | tuple[str, ...] | None:
        """The head as in `read_anatomy` and task files: one name, several, or None."""
        return self.heads if len(self.heads) > 1 else self.heads[0] if self.heads else None

    @cached_property
    def _holders(self) -> dict[str, tuple[dict[str, Any], str]]:
        first = {name: places[0] for name, places in self.places.items()}
        return {name: (tensor_dict(self.backbone.get_submodule(p), a), a) for name, (p, a) in first.items()}

    def tensor(self, name: str) -> Tensor:
        """Return the backbone's current tensor of that name."""
        held, attribute = self._holders[name]
        return held[attribute]  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        self.check_layers()
        return {name: self.tensor(name) for name in self.places}

    def check_layers(self) -> None:
        """Raise if a layer of the backbone was replaced since it was read: tasks would go on using the old one."""
        for path, children, name, child in self._tree:
            if children.get(name) is not child:
                raise BackboneError(
                    f"the backbone's layer {_join(path, name)!r} was replaced after Network(backbone) had read it: "
                    "make a new Network of the changed backbone"
                )

    def is_tied(self, name: str) -> bool:
        """Whether several modules hold the tensor."""
        return len({id(self.backbone.get_submodule(path)) for path, _ in self.places[name]}) > 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.backbone.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensor(next(iter(self.places))).device

    def head_names(self) -> list[str]:
        """Return the names of the tensors that only the head holds."""
        return _held_by(self.heads, self.places)

    @cached_property
    def norm_of(self) -> dict[str, str]:
        """Tensor -> its norm layer, including norms that new tasks do not own."""
        return {name: path for path, names in _norms(self.backbone, self.places).items() for name in names}

    @cached_property
    def fingerprinted(self) -> list[str]:
        """The tensors in the fingerprint: those of the state dict, without the head and step counters."""
        transient = {_join(p, n) for p, m in self.backbone.named_modules() for n in m._non_persistent_buffers_set}
        return sorted(n for n in self.places.keys() - transient - set(self.head_names()) if not n.endswith(COUNTER))

    @property
    def head_tied(self) -> bool:
        """Whether the head shares a tensor with another layer (in language models, the embedding)."""
        return any(len({within(path, self.heads) for path, _ in held}) > 1 for held in self.places.values())

    def as_logits(self, scores: Tensor) -> Tensor:
        """Return scores in float32 whose softmax is the network's answer: if the network ends in one, its logarithm."""
        scores = scores.float()
        return scores.clamp(min=torch.finfo(torch.float32).tiny).log() if self.probabilities else scores

    def fingerprint(self) -> str:
        """Return a SHA-256 of the names, shapes and float32 values of all tensors but the head's."""
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
    """Find the weights, norm layers and head of a backbone.

    Args:
        example: a batch to run, a mapping of keyword arguments, or the shape of a batch. Needed only if the backbone
            does not state its input.
        transform: patterns of the weights that tasks transform. By default, the weights of all convolutions, linear
            layers, recurrent layers and fused attention projections but the head.
        skip: patterns of weights not to transform.
        norms: patterns of the norm layers that a task gets its own copy of. By default, all.
        head: the layer that a task replaces, several if the network combines their outputs, or None for a backbone
            that returns features.
        scale_free: patterns of the weights whose k0 is fixed to 1. By default, those that feed a norm that cancels
            scales.
    """
    refuse(backbone)
    places = tensor_places(backbone)
    seen = trace(backbone, example)
    heads = find_heads(backbone, seen) if head == AUTO else named_heads(backbone, seen, head)
    in_head = set(_held_by(heads or (), places))
    matrices = [name for name, parameter in backbone.named_parameters() if parameter.dim() >= 2]
    owners = [(path, m, a) for path, m in backbone.named_modules() for a in weight_attributes(m)]
    usual = [_join(path, a) for path, m, a in owners if m._parameters.get(a) is not None]
    every = [n for n in usual if n in places] if transform == AUTO else _match(transform, matrices, "transform")
    found = [name for name in _in_order(backbone, every, seen) if name not in in_head]
    skipped = set(_match(skip, found, "skip"))
    weights = {name: _describe(backbone, places, name, seen) for name in found if name not in skipped}
    refuse_bypassed(backbone, seen.bypassed)
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
        probabilities=seen.probabilities and heads != (),
        places=places,
        outside=outside,
    )


def describe(anatomy: Anatomy, name: str) -> Weight:
    """Return the weight of that name, even if new tasks do not transform it: a task file may."""
    return anatomy.weights.get(name) or _describe(anatomy.backbone, anatomy.places, name, None)


def tensor_places(module: nn.Module) -> Places:
    """Return tensor -> all (module, attribute) pairs that hold it. A tied tensor goes by its first name."""
    first: dict[int, str] = {}
    places: Places = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                name = first.setdefault(id(tensor), _join(path, attribute))
                places.setdefault(name, []).append((path, attribute))
    return places


def tensor_dict(owner: nn.Module, attribute: str) -> dict[str, Any]:
    """Return the dict in which a module holds a tensor."""
    return owner._parameters if attribute in owner._parameters else owner._buffers


def _held_by(layers: Sequence[str], places: Places) -> list[str]:
    """Return the tensors that only these layers hold."""
    return [name for name, held in places.items() if all(within(path, layers) for path, _ in held)]


def _in_order(backbone: nn.Module, names: Iterable[str], seen: Trace) -> list[str]:
    """Sort names by the order in which their layers run. A layer that never ran follows the one before it."""
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
    feeds = [seen.feeds.get(path, ()) if seen else () for path in [_parent(name), *tied]]
    paths = list(dict.fromkeys(path for found in feeds for path in found))
    norms = [backbone.get_submodule(path) for path in paths]
    return Weight(
        name=name,
        shape=tensor.shape,
        kind="conv" if is_conv(module) else "transposed" if is_transposed(module) else "linear",
        groups=getattr(module, "groups", 1),
        feeds=paths[0] if all(feeds) and len(paths) == 1 else None,
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

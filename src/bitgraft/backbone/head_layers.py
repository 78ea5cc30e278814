"""Finds a backbone's head: one classifier, or several whose outputs are combined."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from bitgraft.backbone.layers import is_classifier, is_weighted
from bitgraft.backbone.tracing import Trace
from bitgraft.errors import BackboneError


def find_heads(backbone: nn.Module, seen: Trace) -> tuple[str, ...] | None:
    """Return the layer whose output is the network's output, or else the last layers with one output per class.

    The latter are averaged (distilled networks) or pooled (SqueezeNet) afterwards. The result is empty for a backbone
    that returns features, and None if the head cannot be determined.
    """
    if seen.last is not None:
        return (seen.last,)
    count = getattr(backbone, "num_classes", getattr(backbone, "num_labels", None))
    if count == 0:
        return ()  # how timm marks a backbone that returns features
    heads = []
    for path in sorted(seen.order, key=seen.order.__getitem__, reverse=True):
        layer: Any = backbone.get_submodule(path)
        if is_weighted(layer):
            if not is_classifier(layer) or len(layer.weight) != count:
                break
            heads.append(path)
    return tuple(path for path, _ in backbone.named_modules() if path in heads) or None


def named_heads(backbone: nn.Module, seen: Trace, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the layers that match the user's patterns. Heads that are combined must be named together."""
    patterns = [given] if isinstance(given, str) else list(given or ())
    layers = [path for path, layer in backbone.named_modules() if path and [*layer.parameters(), *layer.buffers()]]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise BackboneError(f"the backbone has no layer {pattern!r} with weights; {heads_hint(backbone)}")
    found = [path for path in layers if any(fnmatchcase(path, pattern) for pattern in patterns)]
    heads = tuple(path for path in found if not within(path.rpartition(".")[0], found))
    combined = find_heads(backbone, seen) or ()
    if heads and set(heads) < set(combined):
        raise BackboneError(f"{type(backbone).__name__} combines {', '.join(combined)}: pass head={combined!r}")
    return heads


def unknown_head(backbone: nn.Module) -> BackboneError:
    return BackboneError(
        f"cannot tell which layer of {type(backbone).__name__} is its classifier ({heads_hint(backbone)}): "
        "pass its name, Network(backbone, head=...), or head=None if the backbone returns features"
    )


def within(path: str, layers: Iterable[str]) -> bool:
    """Whether the path is one of these layers or inside one."""
    return any(path == layer or path.startswith(f"{layer}.") for layer in layers)


def heads_hint(backbone: nn.Module) -> str:
    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    last = ", ".join(repr(name) for name in linear[-3:])
    return f"its last linear layers are {last}" if last else "it has no linear layer"

"""What comes out of a task: classes, the backbone's own output, a module of the user's, or features."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy, unknown_head
from bitgraft.backbone.tracing import input_size
from bitgraft.errors import BackboneError, ClassesError, TaskError
from bitgraft.methods.registry import uniform
from bitgraft.task import HeadKind

Plan = tuple[HeadKind, tuple[str, ...] | None, dict[str, Tensor], nn.Module | None]
"""The kind of head, the names of the classes, tensors for the backbone's last layer, a module to take its place."""


def plan(
    anatomy: Anatomy,
    classes: int | Sequence[str] | None,
    head: nn.Module | Literal["auto", "keep"] | None,
    rng: torch.Generator,
) -> Plan:
    names = class_names(classes)
    if isinstance(head, nn.Module):
        _check_place(anatomy)
        return "module", names, {}, head
    if head == "keep":
        return "keep", names, {}, None
    if head is None:
        if names is not None:
            raise TaskError("a task that gives features (head=None) has no classes: leave one of the two out")
        if anatomy.head is None and not anatomy.head_known:
            raise unknown_head(anatomy.backbone)
        return "none", None, {}, None
    if head != "auto":
        raise TaskError(f"head={head!r}: give a module, 'keep' for the backbone's own output, or None for features")
    if names is None:
        raise TaskError("say what the task gives: classes=..., head='keep', a head module, or head=None for features")
    return _classifier(anatomy, names, rng)


def _check_place(anatomy: Anatomy) -> None:
    """There is a layer for a head to replace, or a tensor of features for it to take."""
    if anatomy.head is None and not anatomy.head_known:
        raise unknown_head(anatomy.backbone)
    if anatomy.head is None and anatomy.wrapped is not None:
        raise BackboneError(
            f"the backbone gives a {anatomy.wrapped}, which no head takes: "
            "wrap it in a module that gives the tensor of features"
        )


def class_names(classes: int | Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, bool) or not isinstance(classes, int | Sequence) or isinstance(classes, str):
        raise ClassesError(f"classes={classes!r}: give their number or a list of their names")
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(map(str, classes))
    if not names:
        raise ClassesError("a task needs at least one class")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ClassesError(f"class names must differ, but {', '.join(map(repr, twice[:3]))} come more than once")
    return names


def stated_preprocessing(backbone: nn.Module) -> dict[str, Any]:
    """How the backbone says that its images are made: timm's configuration, or at least its input size."""
    stated = getattr(backbone, "pretrained_cfg", None) or {}
    size = input_size(backbone)
    found = {"size": list(size[1:]) if size is not None else None}
    for key in ("mean", "std", "interpolation", "crop_pct"):
        value = stated.get(key)
        found[key] = list(value) if isinstance(value, tuple | list) else value
    return {key: value for key, value in found.items() if value is not None}


def _classifier(anatomy: Anatomy, names: tuple[str, ...], rng: torch.Generator) -> Plan:
    _check_place(anatomy)
    if anatomy.head is None:
        if anatomy.features is None:
            raise BackboneError(
                "the backbone's output has no dimension of features to put a classifier on: pass a head module"
            )
        device = anatomy.tensor(next(iter(anatomy.places))).device
        linear = nn.Linear(anatomy.features, len(names), device="meta")
        linear.load_state_dict(_fresh(linear, len(names), rng, device), assign=True)
        return "linear", names, {}, linear
    layer = anatomy.backbone.get_submodule(anatomy.head)
    tensors = {f"{anatomy.head}.{name}": t for name, t in _fresh(layer, len(names), rng, None).items()}
    for name in tensors:
        if len(anatomy.places.get(name, ())) != 1:
            raise BackboneError(
                f"the head's {name!r} is tied to another weight of the backbone: pass a head module instead"
            )
    return "classes", names, tensors, None


def _fresh(layer: nn.Module, outputs: int, rng: torch.Generator, device: torch.device | None) -> dict[str, Tensor]:
    """Tensors for a linear layer or 1x1 convolution with so many outputs, drawn as torch draws them."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or set(layer._parameters) - {"weight", "bias"} or len(list(layer.children())):
        raise BackboneError(
            f"the head is a {type(layer).__name__}, which cannot be given another number of outputs: pass a head module"
        )
    like = torch.empty(0, device=device or weight.device)
    bound = 1 / math.sqrt(weight[0].numel())
    tensors: Mapping[str, Tensor] = {"weight": uniform((outputs, *weight.shape[1:]), -bound, bound, rng, like)}
    if layer._parameters.get("bias") is not None:
        tensors = {**tensors, "bias": uniform((outputs,), -bound, bound, rng, like)}
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}

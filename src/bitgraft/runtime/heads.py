"""Heads of tasks: a classifier, the backbone's own output, a user's module, or none (features).

`plan_head` chooses the head when a task is added, `place_head` puts it into the module that runs the task.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.head_layers import unknown_head
from bitgraft.backbone.tracing import input_size
from bitgraft.errors import BackboneError, ClassesError, TaskError
from bitgraft.format.metadata import HeadKind
from bitgraft.methods.registry import uniform
from bitgraft.task import Task

Plan = tuple[HeadKind, tuple[str, ...] | None, dict[str, Tensor], nn.Module | None]
"""The kind of head, the class names, tensors for the backbone's last layer, and a module to replace it."""


def plan_head(
    anatomy: Anatomy,
    classes: int | Sequence[str] | None,
    head: nn.Module | Literal["auto", "keep"] | None,
    rng: torch.Generator,
) -> Plan:
    names = class_names(classes)
    if isinstance(head, nn.Module):
        _check_place(anatomy, head)
        return "module", names, {}, head
    if head == "keep":
        return "keep", names, {}, None
    if head is None:
        if names is not None:
            raise TaskError("a task that returns features (head=None) has no classes: pass only one of the two")
        if not anatomy.head_known:
            raise unknown_head(anatomy.backbone)
        return "none", None, {}, None
    if head != "auto":
        raise TaskError(f"head={head!r}: pass a module, 'keep' for the backbone's own output, or None for features")
    if names is None:
        raise TaskError("the task has no output: pass classes=..., head='keep', a head module, or head=None (features)")
    return _classifier(anatomy, names, rng)


def _check_place(anatomy: Anatomy, head: nn.Module | None) -> None:
    """Raise if a head can neither replace the backbone's last layers nor take its features."""
    if not anatomy.head_known:
        raise unknown_head(anatomy.backbone)
    if not anatomy.heads and anatomy.wrapped is not None:
        raise BackboneError(
            f"the backbone returns a {anatomy.wrapped}, which a head cannot take: "
            "wrap it in a module that returns the tensor of features"
        )
    count = len(anatomy.heads)
    if head is not None and count > 1 and not (isinstance(head, nn.ModuleList) and len(head) == count):
        raise TaskError(
            f"the backbone combines {', '.join(anatomy.heads)}: pass a torch.nn.ModuleList of {count} heads"
        )


def class_names(classes: int | Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, bool) or not isinstance(classes, int | Sequence) or isinstance(classes, str):
        raise ClassesError(f"classes={classes!r}: pass their number or a list of their names")
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(map(str, classes))
    if not names:
        raise ClassesError("a task needs at least one class")
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ClassesError(f"class names must be unique; repeated: {', '.join(map(repr, repeated[:3]))}")
    return names


def stated_preprocessing(backbone: nn.Module) -> dict[str, Any]:
    """Return the preprocessing that the backbone states: timm's configuration, or at least its input size."""
    config, size = getattr(backbone, "pretrained_cfg", None) or {}, input_size(backbone)
    stated = {"size": size[1:] if size is not None else None}
    stated |= {key: config.get(key) for key in ("mean", "std", "interpolation", "crop_pct")}
    return {k: list(v) if isinstance(v, tuple | list) else v for k, v in stated.items() if v is not None}


def _classifier(anatomy: Anatomy, names: tuple[str, ...], rng: torch.Generator) -> Plan:
    """Plan new tensors for the backbone's last layer, or a linear layer on its features or in place of a tied head."""
    _check_place(anatomy, None)
    layers = [anatomy.backbone.get_submodule(head) for head in anatomy.heads]
    if anatomy.head_tied and not (len(layers) == 1 and isinstance(layers[0], nn.Linear)):
        raise BackboneError(
            f"the head {anatomy.head!r} shares weights with other layers and is not linear: pass a head module"
        )
    if not layers or anatomy.head_tied:
        if anatomy.features is None:
            raise BackboneError("the backbone's output has no feature dimension: pass a head module")
        linear = nn.Linear(anatomy.features, len(names), device="meta")
        linear.load_state_dict(_fresh(linear, len(names), rng, anatomy.device), assign=True)
        return "linear", names, {}, linear
    tensors: dict[str, Tensor] = {}
    for head, layer in zip(anatomy.heads, layers, strict=True):
        tensors |= {f"{head}.{name}": tensor for name, tensor in _fresh(layer, len(names), rng, None).items()}
    return "classes", names, tensors, None


def _fresh(layer: nn.Module, outputs: int, rng: torch.Generator, device: torch.device | None) -> dict[str, Tensor]:
    """Return tensors for a linear layer or 1x1 convolution with this many outputs, initialised as torch does."""
    weight = layer._parameters.get("weight")
    if weight is None or set(layer._parameters) - {"weight", "bias"} or len(list(layer.children())):
        raise BackboneError(
            f"the head is a {type(layer).__name__}, whose number of outputs cannot be changed: pass a head module"
        )
    like = torch.empty(0, device=device or weight.device)
    bound = 1 / math.sqrt(weight[0].numel())
    shapes = {"weight": (outputs, *weight.shape[1:]), "bias": (outputs,)}
    names = [name for name in shapes if layer._parameters.get(name) is not None]
    return {name: nn.Parameter(uniform(shapes[name], -bound, bound, rng, like)) for name in names}


def place_head(module: nn.Module, task: Task) -> "Headed | None":
    """Put the task's head into a copy of the backbone. If the head runs on the module's output instead, return it."""
    kind, heads = task.metadata.head, task.anatomy.heads
    if kind != "keep":
        layers = [module.get_submodule(name) for name in heads] if kind == "classes" else []
        _set_num_classes(module, layers, 0 if kind == "none" else len(task.classes or ()) or None)
    if kind == "none":
        for name in heads:
            module.set_submodule(name, nn.Identity())
    if task.head is None:
        return None
    if not heads:
        return Headed(task.head)
    for name, head in zip(heads, task.head if len(heads) > 1 else [task.head], strict=True):  # type: ignore[arg-type]
        module.set_submodule(name, Headed(head))
    return None


def _set_num_classes(module: nn.Module, heads: list[nn.Module], count: int | None) -> None:
    """Update the attributes that state the number of outputs, which timm, transformers and exporters read."""
    attributes: list[tuple[Any, str]] = [(head, name) for head in heads for name in ("out_features", "out_channels")]
    attributes += [(module, "num_classes"), (module, "num_labels"), (getattr(module, "config", None), "num_labels")]
    for owner, attribute in attributes:
        if count is not None and isinstance(getattr(owner, attribute, None), int):
            setattr(owner, attribute, count)


class Headed(nn.Module):
    """Runs a head module in its own dtype, float32, on a backbone of any dtype. It has the module's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._own_dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":  # not set yet, while being copied
                raise
            return getattr(self.layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next((t.dtype for t in tree_leaves((args, kwargs)) if _is_float(t)), None)
        if self._own_dtype in (None, given) or given is None:
            return self.layer(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), self._own_dtype)
        return _cast(self.layer(*args, **kwargs), given)

    def ordinary(self, dtype: torch.dtype) -> nn.Module:
        """Return this head without bitgraft classes, for a backbone of this dtype."""
        if self._own_dtype in (None, dtype):
            return self.layer
        graph = fx.Graph()
        x = graph.placeholder("x")
        output = graph.call_module("layer", (graph.call_method("to", (x, self._own_dtype)),))
        graph.output(graph.call_method("to", (output, graph.call_function(getattr, (x, "dtype")))))
        return fx.GraphModule({"layer": self.layer}, graph)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_float(value) else value, values)

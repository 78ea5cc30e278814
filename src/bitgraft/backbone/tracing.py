"""One forward pass of a private copy of the backbone, watched."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitgraft.backbone.layers import is_classifier, is_norm, is_weighted
from bitgraft.errors import BackboneError

SIZES = (224, 64, 32, 28, 96, 128, 256, 299, 384)  # tried in turn where a backbone does not say what it takes

Example = Tensor | Mapping[str, Any] | Sequence[int]
"""A batch, a batch of keyword arguments, or the shape of a batch."""


@dataclass
class Trace:
    order: dict[str, int] = field(default_factory=dict)
    """Each layer that ran -> when it first ran."""
    feeds: dict[str, str] = field(default_factory=dict)
    """Each layer whose output is the input of a norm -> that norm."""
    last: str | None = None
    """The linear layer or 1x1 convolution whose output is the network's output."""
    width: int | None = None
    """The size of the output's last dimension."""
    wrapped: str | None = None
    """The type of what the network gives, where that is not a tensor."""


def private_copy(backbone: nn.Module) -> nn.Module:
    """The backbone's module tree over again, its parameters shared and its buffers, which layers write to, copied."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in backbone.parameters()}
    try:
        return copy.deepcopy(backbone, memo)
    except Exception as cause:  # whatever the user's module raises when it is copied
        raise BackboneError(
            f"{type(backbone).__name__} cannot be copied ({type(cause).__name__}: {cause}): "
            "make copy.deepcopy(backbone) work, for example by detaching tensors kept as plain attributes"
        ) from cause


def logits(output: Any) -> Tensor:
    """The tensor of scores in what a backbone returns (transformers and some detectors wrap it)."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return logits(output.logits)
    if isinstance(output, dict) and output:
        return logits(next(iter(output.values())))
    if isinstance(output, list | tuple) and output:
        return logits(output[0])
    raise BackboneError(f"the backbone returned a {type(output).__name__}, with no tensor of scores in it")


def trace(backbone: nn.Module, example: Example | None) -> Trace:
    """Run a private copy once, in evaluation mode, on `example` or on what the backbone seems to take."""
    first = next(iter([*backbone.parameters(), *backbone.buffers()]), None)
    if first is None:
        raise BackboneError(f"{type(backbone).__name__} has no weights: there is nothing to add a task to")
    problem: Exception | None = None
    for batch in _examples(backbone, example, first):
        try:
            return _watch(private_copy(backbone).eval(), batch)
        except BackboneError:
            raise
        except Exception as cause:  # whatever the user's forward raises for a batch it does not take
            problem = problem or cause
    raise BackboneError(
        f"{type(backbone).__name__} could not be run to read it ({type(problem).__name__}: {problem}): pass a batch "
        "that it takes, Network(backbone, example=torch.zeros(1, 3, 224, 224)), or example={...} for keyword arguments"
    ) from problem


def _examples(backbone: nn.Module, example: Example | None, like: Tensor) -> Iterator[Tensor | Mapping[str, Any]]:
    """The example, or what the backbone states, and sizes to try (timm states that of its weights' training)."""
    if isinstance(example, Tensor | Mapping):
        yield example
        return
    if example is not None:
        shapes = [tuple(example)]
    else:
        stated, words = input_size(backbone), getattr(backbone, "dummy_inputs", None)  # words: transformers
        if stated is None and isinstance(words, Mapping):
            yield {name: value.to(like.device) for name, value in words.items()}
        shapes = [*([(1, *stated)] if stated is not None else []), *_usual_shapes(backbone)]
    for shape in shapes:
        yield torch.zeros(shape, device=like.device, dtype=like.dtype if like.is_floating_point() else torch.float32)


def input_size(backbone: nn.Module) -> tuple[int, ...] | None:
    """(channels, height, width) as timm, transformers or our own backbones state it."""
    size = (getattr(backbone, "pretrained_cfg", None) or {}).get("input_size") or getattr(backbone, "input_size", None)
    config = getattr(backbone, "config", None)
    pixels = getattr(config, "image_size", None)
    if size is None and pixels is not None:
        sides = pixels if isinstance(pixels, Sequence) else (pixels, pixels)
        size = (getattr(config, "num_channels", 3), *sides)
    return tuple(size) if size is not None else None


def _usual_shapes(backbone: nn.Module) -> list[tuple[int, ...]]:
    """Batches of one that the first convolution or linear layer could take."""
    for module in backbone.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            dimensions = len(module.kernel_size)
            return [(1, module.in_channels, *[s] * dimensions) for s in (SIZES if dimensions < 3 else (16, 32, 64))]
        if isinstance(module, nn.Linear):
            return [(1, module.in_features)]
    return [(1, 3, size, size) for size in SIZES]


def _watch(module: nn.Module, batch: Tensor | Mapping[str, Any]) -> Trace:
    watch = _Watch()
    for name, layer in module.named_modules():
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, name=name: watch.enter(name, layer, [*args, *kwargs.values()]), with_kwargs=True
        )
        layer.register_forward_hook(lambda layer, _, output, name=name: watch.leave(name, layer, output))
    with torch.no_grad(), warnings.catch_warnings(), watch:
        warnings.simplefilter("ignore")  # those of the user's forward belong to the user's calls
        output = module(**batch) if isinstance(batch, Mapping) else module(batch)
    return watch.trace(output)


class _Watch(TorchFunctionMode):
    """Follows the outputs of weighted layers by identity: into norms, into anything else, and out of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.order: dict[str, int] = {}
        self.made: dict[int, tuple[str, nn.Module, Tensor, int]] = {}  # with the tensor: a freed id is used again
        self.into_norm: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        self.norms_entered = 0

    def enter(self, name: str, layer: nn.Module, inputs: list[Any]) -> None:
        if is_norm(layer):
            self.norms_entered += 1
            if inputs and id(inputs[0]) in self.made:
                self.into_norm[self.made[id(inputs[0])][0]] = name

    def leave(self, name: str, layer: nn.Module, output: Any) -> None:
        self.order.setdefault(name, len(self.order))
        if is_norm(layer):
            self.norms_entered -= 1
        if isinstance(output, Tensor) and is_weighted(layer):
            self.made[id(output)] = (name, layer, output, output._version)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.norms_entered and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.use((args, kwargs))
        return result

    def use(self, values: Any) -> None:
        """Note where the outputs of layers go that do not go into a norm."""
        ids = (id(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        self.elsewhere.update(self.made[i][0] for i in ids if i in self.made)

    def trace(self, output: Any) -> Trace:
        self.use(output)
        scores = logits(output)
        storage = scores.untyped_storage()._cdata
        last = [
            name
            for name, layer, made, version in self.made.values()
            if is_classifier(layer) and made.untyped_storage()._cdata == storage and made._version == version
        ]
        return Trace(
            order=self.order,
            feeds={name: norm for name, norm in self.into_norm.items() if name not in self.elsewhere},
            last=last[-1] if last else None,
            width=int(scores.shape[-1]) if scores.dim() > 1 else None,
            wrapped=None if isinstance(output, Tensor) else type(output).__name__,
        )

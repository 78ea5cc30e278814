"""Traces one forward pass of a private copy of the backbone."""

import copy
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitgraft.backbone.layers import is_classifier, is_norm, is_weighted
from bitgraft.errors import BackboneError

SIZES = (224, 64, 32, 28, 96, 128, 256, 299, 384)  # tried in turn if a backbone does not state its input size

Example = Tensor | Mapping[str, Any] | Sequence[int]
"""A batch, a batch of keyword arguments, or the shape of a batch."""


@dataclass
class Trace:
    order: dict[str, int]
    """Layer -> its place in the order of first calls."""
    feeds: dict[str, tuple[str, ...]]
    """Layer -> the norm layers that alone consume its output: several if it runs more than once."""
    last: str | None
    """The linear layer or 1x1 convolution whose output is the network's output."""
    width: int | None
    """The size of the output's last dimension."""
    wrapped: str | None
    """The type of the network's output if it is not a tensor."""
    probabilities: bool
    """Whether the network ends in a softmax."""
    bypassed: tuple[str, ...]
    """Parameters that are also used by another reference than their module's."""


def private_copy(backbone: nn.Module) -> nn.Module:
    """Return a copy of the module tree that shares the parameters. Buffers are copied, since layers write to them."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in backbone.parameters()}
    try:
        return copy.deepcopy(backbone, memo)
    except Exception as cause:  # the user's module can raise anything
        raise BackboneError(
            f"{type(backbone).__name__} cannot be copied ({type(cause).__name__}: {cause}): "
            "make copy.deepcopy(backbone) work, for example by detaching tensors kept as plain attributes"
        ) from cause


def logits(output: Any) -> Tensor:
    """Return the tensor of scores in a backbone's output (transformers and some detectors wrap it)."""
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
    """Run a private copy once, in evaluation mode, on `example` or on inputs that the backbone is likely to take."""
    first = next(iter([*backbone.parameters(), *backbone.buffers()]), None)
    if first is None:
        raise BackboneError(f"{type(backbone).__name__} has no weights: there is nothing to add a task to")
    problem: Exception | None = None
    for batch in _examples(backbone, example, first):
        try:
            with _only_copies_run(backbone):
                return _trace_batch(backbone, batch)
        except BackboneError:
            raise
        except Exception as cause:  # the user's forward can raise anything
            problem = problem or cause
    raise BackboneError(
        f"{type(backbone).__name__} could not be run to trace it ({type(problem).__name__}: {problem}): pass a batch "
        "that it takes, Network(backbone, example=torch.zeros(1, 3, 224, 224)), or example={...} for keyword arguments"
    ) from problem


@contextmanager
def _only_copies_run(backbone: nn.Module) -> Iterator[None]:
    """Raise if the backbone's own layers run: its copies call them, so tasks could not replace their weights."""
    names, thread = {id(layer): name for name, layer in backbone.named_modules()}, threading.get_ident()

    def check(layer: nn.Module, inputs: Any) -> None:
        if id(layer) in names and threading.get_ident() == thread:
            raise BackboneError(
                f"{type(backbone).__name__} calls its layer {names[id(layer)]!r} through a lambda or a wrapped function"
                ", which would call the same layer in a copy of the network: call it in a method"
            )

    hook = nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _examples(backbone: nn.Module, example: Example | None, like: Tensor) -> Iterator[Tensor | Mapping[str, Any]]:
    """Yield the example; or else the stated input and, since timm states the size of pretraining, common sizes."""
    if isinstance(example, Tensor | Mapping):
        yield example
        return
    if example is not None:
        shapes = [tuple(example)]
    else:
        stated, dummy = input_size(backbone), getattr(backbone, "dummy_inputs", None)  # of transformers
        if stated is None and isinstance(dummy, Mapping):
            yield {name: value.to(like.device) for name, value in dummy.items()}
        shapes = [*([(1, *stated)] if stated is not None else []), *_common_shapes(backbone)]
    for shape in shapes:
        yield torch.zeros(shape, device=like.device, dtype=like.dtype if like.is_floating_point() else torch.float32)


def input_size(backbone: nn.Module) -> tuple[int, ...] | None:
    """Return (channels, height, width) as stated by timm, transformers or our own backbones."""
    size = (getattr(backbone, "pretrained_cfg", None) or {}).get("input_size") or getattr(backbone, "input_size", None)
    config = getattr(backbone, "config", None)
    pixels = getattr(config, "image_size", None)
    if size is None and pixels is not None:
        sides = pixels if isinstance(pixels, Sequence) else (pixels, pixels)
        size = (getattr(config, "num_channels", 3), *sides)
    return tuple(size) if size is not None else None


def _common_shapes(backbone: nn.Module) -> list[tuple[int, ...]]:
    """Return shapes of single-image batches that the first convolution or linear layer can take."""
    for module in backbone.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            dimensions = len(module.kernel_size)
            return [(1, module.in_channels, *[s] * dimensions) for s in (SIZES if dimensions < 3 else (16, 32, 64))]
        if isinstance(module, nn.Linear):
            return [(1, module.in_features)]
    return [(1, 3, size, size) for size in SIZES]


def _with_own_parameters(module: nn.Module) -> nn.Module:
    """Give a private copy parameters of its own, which share the values: whatever else it uses is told by its `id`."""
    own: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        for name, held in layer._parameters.items():
            if held is not None:
                learns = held.requires_grad and not held.is_inference()  # which cannot be set outside that mode
                layer._parameters[name] = own.setdefault(id(held), nn.Parameter(held.detach(), learns))
        if isinstance(layer, nn.RNNBase):  # a second list of the weights
            layer._flat_weights = [layer._parameters.get(name) for name in layer._flat_weights_names]
    return module


def _trace_batch(backbone: nn.Module, batch: Tensor | Mapping[str, Any]) -> Trace:
    module = _with_own_parameters(private_copy(backbone).eval())
    tracer = _Tracer({id(parameter): name for name, parameter in backbone.named_parameters()})
    for name, layer in module.named_modules():
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, name=name: tracer.enter(name, layer, [*args, *kwargs.values()]),
            with_kwargs=True,
        )
        layer.register_forward_hook(lambda layer, _, output, name=name: tracer.leave(name, layer, output))
    with torch.no_grad(), warnings.catch_warnings(), tracer:
        warnings.simplefilter("ignore")  # the user sees them in their own calls
        output = module(**batch) if isinstance(batch, Mapping) else module(batch)
    return tracer.trace(output)


class _Tracer(TorchFunctionMode):
    """Tracks where the outputs of weighted layers go: into norms, into other operations, out of the network.

    `originals` are the names of the backbone's own parameters by `id`, which its copy should not use.
    """

    def __init__(self, originals: Mapping[int, str]) -> None:
        super().__init__()
        self.originals = originals
        self.bypassed: dict[str, None] = {}
        self.order: dict[str, int] = {}
        self.outputs: dict[int, tuple[str, nn.Module, Tensor, int]] = {}  # with the tensor, to reserve its id
        self.into_norm: dict[str, dict[str, None]] = {}
        self.elsewhere: set[str] = set()
        self.norms_entered = 0

    def enter(self, name: str, layer: nn.Module, inputs: list[Any]) -> None:
        if is_norm(layer):
            self.norms_entered += 1
            if inputs and id(inputs[0]) in self.outputs:
                self.into_norm.setdefault(self.outputs[id(inputs[0])][0], {})[name] = None

    def leave(self, name: str, layer: nn.Module, output: Any) -> None:
        self.order.setdefault(name, len(self.order))
        if is_norm(layer):
            self.norms_entered -= 1
        if isinstance(output, Tensor) and is_weighted(layer):
            self.outputs[id(output)] = (name, layer, output, output._version)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.use((args, kwargs), outside_norms=not self.norms_entered)
        return result

    def use(self, values: Any, *, outside_norms: bool = True) -> None:
        """Record the layers whose outputs are used outside a norm, and the backbone's own parameters."""
        ids = [id(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        self.bypassed |= dict.fromkeys(self.originals[i] for i in ids if i in self.originals)
        if outside_norms:
            self.elsewhere.update(self.outputs[i][0] for i in ids if i in self.outputs)

    def trace(self, result: Any) -> Trace:
        self.use(result)
        scores = logits(result)
        storage = scores.untyped_storage()._cdata
        last = [
            name
            for name, layer, output, version in self.outputs.values()
            if is_classifier(layer) and output.untyped_storage()._cdata == storage and output._version == version
        ]
        return Trace(
            order=self.order,
            feeds={name: tuple(norms) for name, norms in self.into_norm.items() if name not in self.elsewhere},
            last=last[-1] if last else None,
            width=int(scores.shape[-1]) if scores.dim() > 1 else None,
            wrapped=None if isinstance(result, Tensor) else type(result).__name__,
            probabilities=_are_probabilities(scores),
            bypassed=tuple(self.bypassed),
        )


def _are_probabilities(scores: Tensor) -> bool:
    if scores.is_meta or scores.dim() != 2 or len(scores) < 1 or scores.shape[1] < 2 or not scores.is_floating_point():
        return False
    off = (scores.float().sum(1) - 1).abs().max().item()
    return bool((scores >= 0).all()) and off < torch.finfo(scores.dtype).eps + 1e-5

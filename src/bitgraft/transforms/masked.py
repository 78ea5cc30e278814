"""Weight transforms: small modules that hold the parameters of an equation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError
from bitgraft.transforms import affine
from bitgraft.transforms.affine import AtRest, Coordinates, Learning, from_bits, learned, mean_size
from bitgraft.transforms.affine import MaskRule as MaskRule
from bitgraft.transforms.affine import strided_like as strided_like
from bitgraft.transforms.affine import widened as widened
from bitgraft.transforms.bits import pack, packed_size, threshold, unpack
from bitgraft.transforms.cpu import Packed


@dataclass(frozen=True)
class Weight:
    """One weight of the backbone, as a transform needs to know it."""

    name: str
    shape: torch.Size
    kind: Literal["conv", "transposed", "linear"]
    groups: int = 1
    feeds: str | None = None
    """The norm layer that takes this layer's output and nothing else, if there is one."""
    scale_free: bool = False
    """That norm undoes any scale of this weight, so k0 stays 1 (the paper, section 3.1)."""
    channels_scale_free: bool = False
    """That norm undoes a scale of each output channel by itself, so k0 stays 1 also with one k per channel."""

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.shape[2:])

    @property
    def outputs(self) -> int:
        return self.shape[1] * self.groups if self.kind == "transposed" else self.shape[0]

    @property
    def grouped_shape(self) -> tuple[int, ...]:
        """The weight's shape with the groups of a transposed convolution split off, so that channels broadcast."""
        if self.kind == "transposed":
            return (self.groups, self.shape[0] // self.groups, *self.shape[1:])
        return tuple(self.shape)

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """How a vector with one entry per output channel broadcasts against `grouped_shape`."""
        if self.kind == "transposed":
            return (self.groups, 1, self.shape[1], *(1 for _ in self.kernel))
        return (self.shape[0], *(1 for _ in self.shape[1:]))

    def filters(self, tensor: Tensor) -> Tensor:
        """The weight as a matrix with one filter (one output channel) per row."""
        if self.kind == "transposed":
            tensor = tensor.reshape(self.grouped_shape).transpose(1, 2)  # (g, out/g, in/g, *kernel)
        return tensor.reshape(self.outputs, -1)

    def from_filters(self, matrix: Tensor) -> Tensor:
        """The inverse of `filters`."""
        if self.kind == "transposed":
            groups, inputs, outputs, *kernel = self.grouped_shape
            matrix = matrix.reshape(groups, outputs, inputs, *kernel).transpose(1, 2)
        return matrix.reshape(self.shape)


class Transform(nn.Module):
    """W -> W~, with a few parameters of its own. Subclasses say what they cost and what goes into a file."""

    tail: nn.Module | None
    """A module to run on the layer's output, which it gives back in the same dtype (series adapters alone have one)."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["tail"] = None  # what `self.tail = None` comes to, without looking for tensors

    def forward(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def role(self, parameter: str) -> str:
        """What a parameter of this name is to an optimiser: "scores", "k", "k1" (k1) or "weights"."""
        return "weights"

    def bits(self, *, statistics: bool = False) -> int:
        """What the transform costs at rest, running statistics of norms that it brings along left out or counted."""
        held = [*self.parameters(), *(b for b in self.buffers() if statistics and b.is_floating_point())]
        return 32 * sum(tensor.numel() for tensor in held)

    def freeze(self) -> None:
        """End of learning: drop what only learning needs. W~ stays the same to the last bit."""
        self.requires_grad_(False)

    def parts(self) -> dict[str, Tensor]:
        """The named tensors that a file holds for this transform."""
        return dict(self.state_dict())

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Become what `parts` came from, frozen."""
        expect({name: tuple(t.shape) for name, t in self.state_dict().items()}, parts)
        self.load_state_dict(dict(parts), assign=True)
        self.freeze()


@runtime_checkable
class Prunable(Protocol):
    """A transform that can give up some of what it owns."""

    def prune(self, share: float) -> None: ...


def expect(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Tensor]) -> None:
    """Refuse parts whose names or shapes are not those expected."""
    if {name: t.shape for name, t in parts.items()} != shapes:
        found = {name: tuple(t.shape) for name, t in parts.items()}
        raise CorruptError(f"a transform's parts should be {dict(shapes)}, the file has {found}; it is not usable")


START = (1.0, 0.0, 0.0, 0.0)  # where a learned k begins: W~ = W


class Masked(Transform):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M with M = 1[R >= threshold] (the paper, equation 2).

    While it learns it holds R (`scores`) and the learned k, with k1 apart (`k1`); frozen, it holds M packed to bits
    and all four k. It begins where W~ = W with all of the mask set, as the paper has it.
    """

    scores: nn.Parameter | None
    k: nn.Parameter | None
    k1: nn.Parameter | None
    constants: Tensor
    packed: Tensor | None
    weight: Weight
    rule: MaskRule
    k2_scaled_by_r: bool
    channels_last: bool
    """While it learns, give W~ with the channels last, as the images are laid out that it will meet."""

    def __init__(self, weight: Weight, rule: MaskRule, scores: Tensor | None) -> None:
        super().__init__()
        # no tensors, which `__setattr__` would look for
        self.__dict__.update(weight=weight, rule=rule, k2_scaled_by_r=False, channels_last=False)
        if scores is None:
            self._hold(None, None)  # until `restore` brings them
            return
        k = torch.tensor([START[i] if v is None else v for i, v in enumerate(rule.fixed)], device=scores.device)
        if rule.per_channel:
            k = k[:, None].repeat(1, weight.outputs)
        self.scores = nn.Parameter(scores)
        self.k = nn.Parameter(k[list(self.rule.kept)]) if self.rule.kept else None
        self.k1 = nn.Parameter(k[1].clone()) if 1 in rule.learned else None
        self.register_buffer("constants", k)
        self.register_buffer("packed", None)

    def forward(self, weight: Tensor) -> Tensor:
        if self.scores is None:
            return from_bits([self.held(weight)])[0]
        return _shaped(learned([self.learning(weight)])[0], weight.shape)

    def learning(self, weight: Tensor) -> Learning:
        """While it learns, with its weight: so that W~ of many can be computed in one call."""
        assert self.scores is not None
        shape, channel = self._broadcast(weight)
        scores, view = _shaped(self.scores, shape), _shaped(weight, shape)  # others for transposed convolutions alone
        channels_last = self.channels_last and weight.dim() == 4 and view is weight
        ours = (self.k, self.k1, self.constants)
        return Learning(scores, *ours, view, self.rule, self._coordinates(), channel, channels_last)

    def held(self, weight: Tensor, out: Tensor | None = None) -> AtRest:
        """Frozen, with its weight: so that W~ of many can be computed in one call, in `out` if that is of use."""
        assert self.packed is not None
        return AtRest(Packed(weight, self.packed, self.constants, out), *self._broadcast(weight))

    def _broadcast(self, weight: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
        """How the weight and a vector of channels broadcast."""
        if self.rule.per_channel:
            return torch.Size(self.weight.grouped_shape), self.weight.channel_shape
        return weight.shape, ()

    def values(self) -> Tensor:
        """k0..k3, (4,) or (4, channels), constants included."""
        size = None
        if self.k2_scaled_by_r and self.scores is not None:
            channel = self.weight.channel_shape if self.rule.per_channel else ()
            view = self.scores.view(self.weight.grouped_shape) if self.rule.per_channel else self.scores
            size = mean_size(view.detach(), self.rule.threshold, channel)
        return self._coordinates().values(self.constants, self.k, self.k1, size)

    def _coordinates(self) -> Coordinates:
        return Coordinates(self.rule.kept, self.k2_scaled_by_r)

    @torch.no_grad()
    def scale_k2_by_r(self, reach: float, rng: torch.Generator) -> None:
        """Let k2 follow R, which begins at random within this reach: W~ = W ± mean|R|, times a factor that is learned.

        From the paper's start, where k2 = 0, a bit's meaning changes whenever k2 changes its sign, and what R has
        gathered until then is lost. Here R is what fine-tuning would add to W, and W~ has its sign and mean size: a bit
        means the same from the first step on, and moves its weight as far as R has come. Nothing happens where
        something has been learned already, or where k1 or k2 is a constant.
        """
        if self.scores is None or self.k1 is None or 2 not in self.rule.kept or not self._is_at_start():
            return
        self.k2_scaled_by_r = True
        drawn = (2 * torch.rand(self.weight.shape, generator=rng) - 1) * reach + self.rule.threshold
        self.scores.copy_(drawn)

    def _is_at_start(self) -> bool:
        start, learned = self.constants.new_tensor(START), self.rule.learned
        return not self.k2_scaled_by_r and bool((self.values().view(4, -1)[learned] == start[learned, None]).all())

    def role(self, parameter: str) -> str:
        return parameter

    def mask(self) -> Tensor:
        """M as a bool tensor of the weight's shape."""
        if self.scores is None:
            assert self.packed is not None
            return unpack(self.packed, self.weight.shape)
        return threshold(self.scores, self.rule.threshold)

    def bits(self, *, statistics: bool = False) -> int:
        channels = self.weight.outputs if self.rule.per_channel else 1
        return self.weight.shape.numel() + 32 * channels * len(self.rule.learned)

    def freeze(self) -> None:
        if self.scores is not None:
            self._hold(**self.parts())

    def parts(self) -> dict[str, Tensor]:
        if self.scores is None and self.packed is None:  # values are still to come: sizes alone
            kinds = {"mask": torch.uint8, "k": torch.float32}
            return {name: torch.empty(size, dtype=kinds[name], device="meta") for name, size in self._sizes().items()}
        packed = self.packed if self.packed is not None else pack(self.mask())
        return {"mask": packed, "k": self.values().detach()}

    def train(self, mode: bool = True) -> Self:
        """All that the mode comes to where no modules are inside; a task has dozens of masks."""
        self.__dict__["training"] = mode
        return self

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        expect(self._sizes(), parts)
        self._hold(parts["mask"], parts["k"])

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        k = (4, self.weight.outputs) if self.rule.per_channel else (4,)
        return {"mask": (packed_size(self.weight.shape.numel()),), "k": k}

    def _hold(self, mask: Tensor | None, k: Tensor | None) -> None:
        self._parameters.update(scores=None, k=None, k1=None)
        self._buffers.update(packed=mask, constants=k)


def transformed(
    transforms: Mapping[str, Transform], weights: Mapping[str, Tensor], out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """W~ of each weight by its transform: all frozen masks at once, all that learn, and the rest one by one."""
    masks = {name: transform for name, transform in transforms.items() if isinstance(transform, Masked)}
    out = out or {}
    frozen = {name: mask.held(weights[name], out.get(name)) for name, mask in masks.items() if mask.scores is None}
    learning = {name: mask.learning(weights[name]) for name, mask in masks.items() if mask.scores is not None}
    found = dict(zip(frozen, from_bits(list(frozen.values())), strict=True))
    found |= zip(learning, learned(list(learning.values())), strict=True)
    return {
        name: _shaped(found[name], weights[name].shape) if name in found else transform(weights[name])
        for name, transform in transforms.items()
    }


def one_by_one(
    transforms: Mapping[str, Transform], weights: Mapping[str, Tensor], outs: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """W~ of each weight at rest as a call, which leaves it in the weight's out if that is of use."""
    masks = {name: mask for name, mask in transforms.items() if isinstance(mask, Masked) and mask.scores is None}
    held = [mask.held(weights[name], outs[name]) for name, mask in masks.items()]
    found = dict(zip(masks, affine.one_by_one(held), strict=True))
    return {name: found.get(name, partial(transform, weights[name])) for name, transform in transforms.items()}


def _shaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A view costs as much as a small kernel."""
    return tensor if tensor.shape == shape else tensor.view(shape)

"""Weight transforms: the paper's equation as a pure function, and the small module that holds its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError
from bitgraft.masks import Surrogate, pack, packed_size, threshold, through_surrogate, unpack


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
        self.tail = None

    def forward(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def role(self, parameter: str) -> str:
        """What a parameter of this name is to an optimiser: "scores", "k", "shift" (k1) or "weights"."""
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
    found = {name: tuple(t.shape) for name, t in parts.items()}
    if found != dict(shapes):
        raise CorruptError(f"a transform's parts should be {dict(shapes)}, the file has {found}; it is not usable")


def affine(weight: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Equation (2): W~ = k0 W + k1 1 + k2 M + k3 W∘M, computed as M∘(k3 W + k2) + k0 W + k1.

    `k` has the four coefficients first and broadcasts against the weight after that. Half-precision weights are
    transformed in float32 and rounded once. On a CPU `torch.where` would take many times as long, since a learned mask
    is as good as random to its branches; and fresh memory costs more than arithmetic, so all is done in one tensor.
    """
    wide = widened(weight)
    k0, k1, k2, k3 = k.to(wide.dtype).unbind()
    return (wide * k3).add_(k2).mul_(mask).addcmul_(wide, k0).add_(k1).to(weight.dtype)


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: what is added to a half-precision weight is rounded once, at the end."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def strided_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the weight's memory format, since convolutions are faster in the one that the user chose."""
    if tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True)
class MaskRule:
    """How a mask is read off R, and which k are learned (None) or constant, for one weight."""

    fixed: tuple[float | None, ...]
    threshold: float
    surrogate: Surrogate
    per_channel: bool

    @property
    def learned(self) -> list[int]:
        return [i for i, value in enumerate(self.fixed) if value is None]


START = (1.0, 0.0, 0.0, 0.0)  # where a learned k begins: W~ = W


class _LearnedAffine(torch.autograd.Function):
    """`affine` with the surrogate gradient to R. Saves references to R, k and W alone: no copy, no mask."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: Tensor, weight: Tensor, rule: MaskRule, channel: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(scores, k, weight)
        ctx.rule, ctx.channel = rule, channel
        return affine(weight, threshold(scores, rule.threshold, scores.dtype), k.view(4, *channel))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, k, weight = ctx.saved_tensors
        rule, channel = ctx.rule, ctx.channel
        grad, grad_scores, grad_k = widened(grad), None, None
        if ctx.needs_input_grad[1]:
            sums = _grad_k(grad, weight, threshold(scores, rule.threshold, grad.dtype), rule.learned, channel)
            grad_k = sums.view_as(k).to(k.dtype)
        if ctx.needs_input_grad[0]:
            grad_mask = _grad_mask(grad, weight, k.view(4, *channel).to(grad.dtype), rule.fixed[3] == 0)
            grad_scores = through_surrogate(grad_mask, scores, rule.threshold, rule.surrogate).to(scores.dtype)
        return grad_scores, grad_k, None, None, None


def _grad_mask(grad: Tensor, weight: Tensor, k: Tensor, no_product: bool) -> Tensor:
    """dE/dM = dE/dW~ ∘ (k2 + k3 W)."""
    _, _, k2, k3 = k.unbind()
    return grad * k2 if no_product else (widened(weight) * k3).add_(k2).mul_(grad)


def _grad_k(grad: Tensor, weight: Tensor, mask: Tensor, learned: list[int], channel: tuple[int, ...]) -> Tensor:
    """dE/dk: sums of dE/dW~ against W, 1, M and W∘M; zero for the k that are constant. The mask is used up."""
    sums = [grad.new_zeros(channel)] * 4
    if 0 in learned:
        sums[0] = (grad * weight).sum_to_size(channel)
    if 1 in learned:
        sums[1] = grad.sum_to_size(channel)
    if 2 in learned or 3 in learned:
        under = mask.mul_(grad)
        sums[2] = under.sum_to_size(channel)
        if 3 in learned:
            sums[2] = sums[2].clone()  # one entry per channel: the sum is `under` itself
            sums[3] = under.mul_(weight).sum_to_size(channel)
    return torch.stack(sums)


class Masked(Transform):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M with M = 1[R >= threshold] (the paper, equation 2).

    While it learns it holds R (`scores`) and the learned k, with k1 apart (`shift`); frozen, it holds M packed to bits
    and all four k. Centred, it learns what `shift` adds to the mean of k2 M rather than k1 itself: the same W~ in other
    coordinates, in which a step of k2 does not move all weights of a layer the same way.
    """

    scores: nn.Parameter | None
    k: nn.Parameter | None
    shift: nn.Parameter | None
    constants: Tensor
    packed: Tensor | None

    def __init__(self, weight: Weight, rule: MaskRule, scores: Tensor) -> None:
        super().__init__()
        self.weight, self.rule = weight, rule
        self.scores = nn.Parameter(scores)
        k = torch.tensor([START[i] if v is None else v for i, v in enumerate(rule.fixed)], device=scores.device)
        if rule.per_channel:
            k = k[:, None].repeat(1, weight.outputs)
        self.centred = False
        self._kept = [index for index in rule.learned if index != 1]
        self.k = nn.Parameter(k[self._kept]) if self._kept else None
        self.shift = nn.Parameter(k[1].clone()) if 1 in rule.learned else None
        self.register_buffer("constants", k)
        self.register_buffer("packed", None)

    def forward(self, weight: Tensor) -> Tensor:
        view = weight.view(self.weight.grouped_shape) if self.rule.per_channel else weight
        channel = self.weight.channel_shape if self.rule.per_channel else ()
        if self.scores is None:
            assert self.packed is not None
            mask = strided_like(weight, unpack(self.packed, self.weight.shape)).view(view.shape)
            return affine(view, mask, self.values().view(4, *channel)).view(weight.shape)
        scores = self.scores.view(view.shape)
        transformed: Tensor = _LearnedAffine.apply(scores, self.values(), view, self.rule, channel)
        return transformed.view(weight.shape)

    def values(self) -> Tensor:
        """k0..k3, (4,) or (4, channels), constants included."""
        if self.k is None and self.shift is None:
            return self.constants
        rows = list(self.constants.unbind())
        if self.k is not None:
            for row, index in enumerate(self._kept):
                rows[index] = self.k[row]
        if self.shift is not None:
            rows[1] = self.shift - rows[2] / 2 if self.centred else self.shift
        return torch.stack(rows)

    @torch.no_grad()
    def centre(self, on: bool) -> None:
        """Learn in centred coordinates, or not. W~ stays what it is."""
        if self.shift is not None and on != self.centred:
            half = self.values()[2] / 2
            self.shift.add_(half if on else -half)
        self.centred = on

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
        packed = self.packed if self.packed is not None else pack(self.mask())
        return {"mask": packed, "k": self.values().detach()}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        size = packed_size(self.weight.shape.numel())
        expect({"mask": (size,), "k": (4, self.weight.outputs) if self.rule.per_channel else (4,)}, parts)
        self._hold(parts["mask"], parts["k"])

    def _hold(self, mask: Tensor, k: Tensor) -> None:
        self.packed, self.constants = mask, k
        self.scores = self.k = self.shift = None

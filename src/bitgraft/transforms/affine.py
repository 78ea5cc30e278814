"""The paper's equation (2) as pure functions: W~ from W, a mask and four k, and the way back to R and k."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitgraft.transforms import cpu
from bitgraft.transforms.bits import Surrogate, threshold, through_surrogate, unpack


def affine(weight: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Equation (2): W~ = k0 W + k1 1 + k2 M + k3 W∘M, computed as (k0 + k3 M)∘W + (k1 + k2 M).

    So an element is W times one of two scales plus one of two shifts, each operation rounded by itself: whoever keeps
    to that gets the same last bit. `k` has the four coefficients first and broadcasts against the weight after that.
    Half-precision weights are transformed in float32 and rounded once. On a CPU `torch.where` would take many times as
    long, since a learned mask is as good as random to its branches.
    """
    wide = widened(weight)
    k0, k1, k2, k3 = k.to(wide.dtype).unbind()
    bits = mask.to(wide.dtype)
    scales = torch.mul(bits, k3, out=torch.empty_like(wide)).add_(k0)  # in the weight's own memory format
    return scales.mul_(wide).add_((bits * k2).add_(k1)).to(weight.dtype)


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

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """Which of k0, k2 and k3 are learned."""
        return tuple(i for i in self.learned if i != 1)


PACE = 3.0  # how much faster than the other k a k2 learns that follows R


@dataclass(frozen=True)
class Coordinates:
    """Where the four k come from: constants, the learned rows among k0, k2 and k3, and k1 by itself.

    Where k2 follows R it is 2 mean|R| exp(PACE its row), and k1 is `k1` less half of k2: W~ moves by the mean size
    of R, up or down as R's sign says, and learns quickly whether that is too much or too little.
    """

    kept: tuple[int, ...]
    """Which of k0, k2 and k3 are learned, in the order of the rows that hold them."""
    k2_scaled_by_r: bool = False

    def values(self, constants: Tensor, k: Tensor | None, k1: Tensor | None, size: Tensor | None = None) -> Tensor:
        """k0..k3, (4,) or (4, channels), constants included. `size` is R's mean one, where k2 follows it."""
        if k is None and k1 is None:
            return constants
        rows = list(constants.unbind())
        if k is not None:
            for row, index in enumerate(self.kept):
                rows[index] = k[row]
        if k1 is not None:
            rows[1] = k1
        if size is not None:
            half = size * torch.exp(PACE * rows[2])
            rows[1], rows[2] = rows[1] - half, 2 * half
        return torch.stack(rows)

    def gradients(
        self, to_values: Tensor, has_k1: bool, k2: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """dE/dk and dE/dk1 from dE/dk0..k3, and from k2 itself where it follows R."""
        rows = list(to_values.unbind())
        if k2 is not None:
            rows[2] = PACE * k2 * (rows[2] - rows[1] / 2)
        return torch.stack([rows[i] for i in self.kept]) if self.kept else None, rows[1] if has_k1 else None


def mean_size(scores: Tensor, threshold: float, channel: tuple[int, ...]) -> Tensor:
    """How far R is from its threshold, the mean over the layer or over each channel."""
    apart = scores if threshold == 0 else scores - threshold
    if not channel:
        size: Tensor = torch.linalg.vector_norm(apart, 1) / apart.numel()
        return size
    sums = apart.abs().sum_to_size(channel)
    return (sums * (sums.numel() / apart.numel())).flatten()


@dataclass(frozen=True, slots=True)
class AtRest:
    """What W~ of a frozen mask is computed from."""

    mask: cpu.Packed
    shape: torch.Size
    """How the weight broadcasts against channels."""
    channel: tuple[int, ...] = ()
    """How a vector of channels broadcasts against that; none where one k is for all."""

    @property
    def weight(self) -> Tensor:
        return self.mask.weight

    def suits_loops(self) -> bool:
        """Each k is for one stretch of memory, elements lie in the order of their bits, and the loops take such."""
        return _in_rows(self.channel) and self.weight.is_contiguous() and cpu.takes(self.weight)

    def plain(self) -> Tensor:
        """In PyTorch alone."""
        weight, k = self.mask.weight, self.mask.k.view(4, *self.channel)
        bits = strided_like(weight, unpack(self.mask.bits, weight.shape))
        if self.shape == weight.shape:  # a view would have other strides where a dimension has size 1
            return affine(weight, bits, k)
        return affine(weight.view(self.shape), bits.view(self.shape), k).view(weight.shape)


def from_bits(held: Sequence[AtRest]) -> list[Tensor]:
    """W~ of masks at rest: in one call those that the compiled loops take, if that is worth a call."""
    fast = _in_one_call(held)
    found = dict(zip(fast, cpu.switch([held[i].mask for i in fast]), strict=True)) if fast else {}
    return [found[i] if i in found else one.plain() for i, one in enumerate(held)]


def one_by_one(held: Sequence[AtRest]) -> list[Callable[[], Tensor]]:
    """`from_bits` as a call for each, with all prepared that can be."""
    fast = set(_in_one_call(held))
    return [cpu.Switch(one.mask) if i in fast else one.plain for i, one in enumerate(held)]


@dataclass(frozen=True, slots=True)
class Learning:
    """What W~ of a mask that learns is computed from. The weight and R are as they broadcast against channels."""

    scores: Tensor
    k: Tensor | None
    k1: Tensor | None
    constants: Tensor
    weight: Tensor
    rule: MaskRule
    coordinates: Coordinates
    channel: tuple[int, ...]
    channels_last: bool
    """Give W~ of a convolution with the channels last, whatever W has."""

    @torch.no_grad()
    def values(self) -> Tensor:
        """k0..k3, (4,) or (4, channels), constants included."""
        k2_scaled_by_r = self.coordinates.k2_scaled_by_r
        size = mean_size(self.scores, self.rule.threshold, self.channel) if k2_scaled_by_r else None
        return self.coordinates.values(self.constants, self.k, self.k1, size)

    def scored(self, values: Tensor) -> cpu.Scored:
        return cpu.Scored(self.weight, self.scores, self.rule.threshold, values, self.channels_last)

    def suits_loops(self) -> bool:
        """Each k is for one stretch of memory, and the loops take such a weight, if there are enough of them."""
        return _in_rows(self.channel) and cpu.takes(self.weight, self.scores)

    def plain(self, values: Tensor) -> Tensor:
        """In PyTorch alone."""
        mask = threshold(self.scores, self.rule.threshold, self.scores.dtype)
        plain = affine(self.weight, mask, values.view(4, *self.channel))
        if not self.channels_last:
            return plain
        return strided_like(torch.empty_like(plain, memory_format=torch.channels_last), plain)  # to the last stride


def learned(held: Sequence[Learning]) -> list[Tensor]:
    """W~ of masks that learn, with gradients to R and k: in one call those that the compiled loops take."""
    values = [one.values() for one in held]
    fast = _in_one_call(held)
    found = dict(zip(fast, cpu.forward([held[i].scored(values[i]) for i in fast]), strict=True)) if fast else {}
    return [
        LearnedAffine.apply(one.scores, one.k, one.k1, one, values[i], [found.get(i)]) for i, one in enumerate(held)
    ]


def _in_one_call(held: Sequence[AtRest | Learning]) -> list[int]:
    """Which of them the compiled loops take; none where that is not worth a call."""
    fast = [i for i, one in enumerate(held) if one.suits_loops()]
    return fast if cpu.worth_a_call([held[i].weight for i in fast]) else []


class LearnedAffine(torch.autograd.Function):
    """`affine` with the surrogate gradient to R. Saves R, W and the four k: no copy, no mask. W~ may be `given`."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        k: Tensor | None,  # noqa: ARG004
        k1: Tensor | None,  # noqa: ARG004
        one: Learning,
        values: Tensor,
        given: list[Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(scores, values, one.weight)
        ctx.one = one
        return one.plain(values) if given[0] is None else given[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, values, weight = ctx.saved_tensors
        one: Learning = ctx.one
        rule, channel, k2_scaled_by_r = one.rule, one.channel, one.coordinates.k2_scaled_by_r
        to_mask: Tensor | None
        sums: Tensor | None
        if grad.dtype == torch.float32 and one.suits_loops() and cpu.is_large(weight):
            grad = grad if cpu.is_transposed(weight, grad) else strided_like(weight, grad)
            to_mask, sums = cpu.backward(grad, one.scored(values))
        else:
            to_mask, sums = _gradients(grad, scores, values, weight, rule, channel, ctx.needs_input_grad)
        to_scores = to_k = to_k1 = None
        if to_mask is not None:
            to_scores = through_surrogate(to_mask, scores, rule.threshold, rule.surrogate).to(scores.dtype)
            if k2_scaled_by_r:  # as if R itself were added: else Adam's moments would lag behind a k2 that grows
                to_scores = to_scores / values[2].view(channel)
        if sums is not None:
            to_values = sums.view_as(values).to(values.dtype)
            to_k, to_k1 = one.coordinates.gradients(
                to_values, one.k1 is not None, values[2] if k2_scaled_by_r else None
            )
        return to_scores, to_k, to_k1, None, None, None


def _in_rows(channel: tuple[int, ...]) -> bool:
    """One k for all, or one for each index of the first dimension: then a k belongs to one stretch of memory."""
    return all(size == 1 for size in channel[1:])


def _gradients(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    weight: Tensor,
    rule: MaskRule,
    channel: tuple[int, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """dE/dM, and dE/dk0..k3 with zeros for the constant ones."""
    grad, to_mask, sums = widened(grad), None, None
    if needed[1] or needed[2]:
        sums = _grad_k(grad, weight, threshold(scores, rule.threshold, grad.dtype), rule.learned, channel)
    if needed[0]:
        to_mask = _grad_mask(grad, weight, values.view(4, *channel).to(grad.dtype), rule.fixed[3] == 0)
    return to_mask, sums


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

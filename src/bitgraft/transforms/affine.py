"""Equation (2) of the paper: W~ from W, a mask M and k0..k3, and the gradients to R and k."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.transforms import kernels
from bitgraft.transforms.base import strided_like, widened
from bitgraft.transforms.bits import Surrogate, surrogate_grad, threshold, unpack

MIN_COMPILED = 1 << 14  # elements; smaller weights are not worth a compiled loop, nor the import of numba


def affine(weight: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M, computed as (k0 + k3 M)∘W + (k1 + k2 M).

    Each element is scaled by one of two values and shifted by one of two. Every operation rounds separately, so any
    implementation that does the same gets the same bits. Half-precision weights are computed in float32 and rounded
    once. `k` is (4, ...), where the remaining dimensions broadcast against the weight.
    """
    wide = widened(weight)
    k0, k1, k2, k3 = k.to(wide.dtype).unbind()
    scale, shift = torch.empty_like(wide), torch.empty_like(wide)  # in the weight's memory format
    torch.where(mask, k3 + k0, k3 * 0 + k0, out=scale)  # k3 * 0 is NaN for an infinite k3, as in the equation
    torch.where(mask, k2 + k1, k2 * 0 + k1, out=shift)
    return scale.mul_(wide).add_(shift).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Operands:
    """The inputs of W~ for one weight."""

    weight: Tensor
    mask: Tensor
    """R, strided like the weight; or packed bits in the weight's row-major order."""
    k: Tensor
    """(4, ...): k0..k3, each broadcasting against the weight."""
    threshold: float = 0.0
    surrogate: Surrogate = "identity"
    k2_scaled_by_r: bool = False
    hardness: float = 1.0
    """See `ScoredTransform.hardness`."""
    channels_last: bool = False
    """Return W~ from R in channels-last format, whatever the format of W."""
    out: Tensor | None = None
    """A buffer for W~ from packed bits. It is used if it matches the weight's shape, strides, dtype and device."""

    @property
    def is_packed(self) -> bool:
        return self.mask.dtype == torch.uint8


def compute(batch: Sequence[Operands]) -> list[Tensor]:
    """Return W~ of each weight, differentiable in k and, where the mask is given as R, in R."""
    suited = [i for i, one in enumerate(batch) if _suits_loops(one)]
    loops = kernels.loops() if any(batch[i].weight.numel() >= MIN_COMPILED for i in suited) else None
    compiled = {} if loops is None else dict(zip(suited, loops.affine([batch[i] for i in suited]), strict=True))
    results = [compiled[i] if i in compiled else compute_in_torch(one) for i, one in enumerate(batch)]
    return [
        StraightThrough.apply(one.mask, one.k, one, [result]) if one.k.requires_grad or not one.is_packed else result
        for one, result in zip(batch, results, strict=True)
    ]


@torch.no_grad()
def compute_in_torch(one: Operands) -> Tensor:
    """Return W~ of one weight without compiled loops or gradients."""
    result = affine(one.weight, _mask_of(one), one.k)
    if not one.channels_last:
        return result
    return strided_like(torch.empty_like(result, memory_format=torch.channels_last), result)  # every stride matches


def _mask_of(one: Operands) -> Tensor:
    """Return M as a bool tensor, strided like the weight."""
    if one.is_packed:
        return strided_like(one.weight, unpack(one.mask, one.weight.shape))
    return threshold(one.mask, one.threshold)


class StraightThrough(torch.autograd.Function):
    """Return a W~ that is already computed, and in the backward pass its gradient to k and, by the surrogate, to R.

    It saves references to R or the packed bits, W and k: no copy, no mask.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Tensor, one: Operands, result: list[Tensor]) -> Tensor:
        ctx.save_for_backward(scores, k, one.weight)
        ctx.one = one
        (w,) = result  # in a list, or autograd would take it for an input
        if (soft := 1 - one.hardness) > 0:
            w.mul_(one.hardness).add_(one.weight, alpha=soft).add_(scores - one.threshold, alpha=soft)
        return w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, k, weight = ctx.saved_tensors
        one: Operands = ctx.one
        if one.is_packed:
            return None, _gradient_to_k(widened(grad), one), None, None
        suited = weight.numel() >= MIN_COMPILED and grad.dtype == torch.float32 and _suits_loops(one)
        if suited and (loops := kernels.loops()) is not None:
            to_mask, to_k = loops.gradients(grad if _is_transposed(weight, grad) else strided_like(weight, grad), one)
        else:
            wide = widened(grad)
            to_mask = (widened(weight) * k[3]).add_(k[2]).mul_(wide)
            to_k = _gradient_to_k(wide, one)
        to_scores = surrogate_grad(to_mask, scores, one.threshold, one.surrogate).to(scores.dtype)
        if one.k2_scaled_by_r:  # as if R itself were added to W; else Adam's moments lag behind a growing k2
            to_scores.div_(k[2])
        if (soft := 1 - one.hardness) > 0:
            to_scores.mul_(one.hardness).add_(grad, alpha=soft)
            to_k.mul_(one.hardness)
        return to_scores, to_k, None, None


def _gradient_to_k(grad: Tensor, one: Operands) -> Tensor:
    """Return dE/dk: the sums of dE/dW~ times W, 1, M and W∘M."""
    weight, masked = widened(one.weight), _mask_of(one) * grad
    terms = grad * weight, grad, masked, masked * weight
    return torch.stack([term.sum_to_size(one.k.shape[1:]) for term in terms]).to(one.k.dtype)


def _suits_loops(one: Operands) -> bool:
    """Whether the compiled loops take it: dense float32 on the CPU, with one k per layer or per filter."""
    weight, mask = one.weight, one.mask
    if weight.device.type != "cpu" or mask.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if any(size > 1 for size in one.k.shape[2:]) or torch.compiler.is_compiling() or weight.dim() < 2:
        return False
    if not all(type(tensor) in (Tensor, nn.Parameter) for tensor in (weight, mask)):
        return False
    if one.is_packed:
        return weight.is_contiguous() and mask.is_contiguous()
    formats = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    dense = any(weight.is_contiguous(memory_format=layout) for layout in formats)
    return mask.dtype == weight.dtype and mask.stride() == weight.stride() and dense


def _is_transposed(weight: Tensor, grad: Tensor) -> bool:
    """Whether the gradient is in channels-last format and the weight is not."""
    channels_last = weight.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    return channels_last and weight.stride() != grad.stride() and weight.is_contiguous()

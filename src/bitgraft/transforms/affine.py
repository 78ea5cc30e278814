"""Equation (2) as pure functions: W~ from W, a mask and four k, and the gradients back to R and k."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.transforms import kernels
from bitgraft.transforms.base import strided_like, widened
from bitgraft.transforms.bits import Surrogate, threshold, through_surrogate, unpack

SMALL = 1 << 14  # elements from which a weight is worth a compiled loop, and the import of a compiler


def affine(weight: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Equation (2): W~ = k0 W + k1 1 + k2 M + k3 W∘M, computed as (k0 + k3 M)∘W + (k1 + k2 M).

    So an element is W times one of two scales plus one of two shifts, each operation rounded by itself: whoever keeps
    to that gets the same last bit. `k` has the four coefficients first and broadcasts against the weight after that.
    Half-precision weights are transformed in float32 and rounded once.
    """
    wide = widened(weight)
    k0, k1, k2, k3 = k.to(wide.dtype).unbind()
    scaled, shift = torch.empty_like(wide), torch.empty_like(wide)  # in the weight's own memory format
    torch.where(mask, k3 + k0, k3 * 0 + k0, out=scaled)
    torch.where(mask, k2 + k1, k2 * 0 + k1, out=shift)
    return scaled.mul_(wide).add_(shift).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Operands:
    """What W~ of one weight is computed from."""

    weight: Tensor
    mask: Tensor
    """R, laid out as the weight; or bits, packed in the weight's row-major order."""
    k: Tensor
    """k0..k3 first; then it broadcasts against the weight."""
    threshold: float = 0.0
    surrogate: Surrogate = "identity"
    k2_scaled_by_r: bool = False
    hardness: float = 1.0
    """Below 1, while it learns, W~ is mixed from this share of itself and the rest of W + R (`Masked.hardness`)."""
    channels_last: bool = False
    """Give W~ of a convolution with the channels last, whatever W has."""
    out: Tensor | None = None
    """Where W~ may be written, if it is computed from bits: as large as the weight, and laid out like it."""

    @property
    def is_packed(self) -> bool:
        return self.mask.dtype == torch.uint8


def compute(given: Sequence[Operands]) -> list[Tensor]:
    """W~ of some weights, out of gradients' reach: by compiled loops, in one call, where these take them."""
    fast = [i for i, one in enumerate(given) if _suits_loops(one)]
    loops = kernels.loops() if any(given[i].weight.numel() >= SMALL for i in fast) else None
    found = dict(zip(fast, loops.affine([given[i] for i in fast]), strict=True)) if loops is not None else {}
    return [found[i] if i in found else plain(one) for i, one in enumerate(given)]


@torch.no_grad()
def plain(one: Operands) -> Tensor:
    """W~ in PyTorch alone."""
    if one.is_packed:
        return affine(one.weight, strided_like(one.weight, unpack(one.mask, one.weight.shape)), one.k)
    found = affine(one.weight, threshold(one.mask, one.threshold), one.k)
    if not one.channels_last:
        return found
    return strided_like(torch.empty_like(found, memory_format=torch.channels_last), found)  # to the last stride


def learned(given: Sequence[Operands]) -> list[Tensor]:
    """W~ of some weights from R, with gradients to R and k."""
    found = compute(given)
    return [LearnedAffine.apply(one.mask, one.k, one, [w]) for one, w in zip(given, found, strict=True)]


class LearnedAffine(torch.autograd.Function):
    """W~ as given, with the surrogate gradient to R. Saves R, W and k: no copy, no mask."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: Tensor, one: Operands, found: list[Tensor]) -> Tensor:
        ctx.save_for_backward(scores, k, one.weight)
        ctx.one = one
        if (soft := 1 - one.hardness) > 0:
            found[0].mul_(one.hardness).add_(one.weight, alpha=soft).add_(scores - one.threshold, alpha=soft)
        return found[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, k, weight = ctx.saved_tensors
        one: Operands = ctx.one
        fast = weight.numel() >= SMALL and grad.dtype == torch.float32 and _suits_loops(one)
        if fast and (loops := kernels.loops()) is not None:
            to_mask, to_k = loops.gradients(grad if _is_transposed(weight, grad) else strided_like(weight, grad), one)
        else:
            to_mask, to_k = _gradients(widened(grad), one)
        to_scores = through_surrogate(to_mask, scores, one.threshold, one.surrogate).to(scores.dtype)
        if one.k2_scaled_by_r:  # as if R itself were added: else Adam's moments would lag behind a k2 that grows
            to_scores.div_(k[2])
        if (soft := 1 - one.hardness) > 0:
            to_scores.mul_(one.hardness).add_(grad, alpha=soft)
            to_k.mul_(one.hardness)
        return to_scores, to_k, None, None


def _gradients(grad: Tensor, one: Operands) -> tuple[Tensor, Tensor]:
    """dE/dM = dE/dW~ ∘ (k2 + k3 W); and dE/dk, the sums of dE/dW~ against 1, W, M and W∘M."""
    weight, k = widened(one.weight), one.k.detach().to(grad.dtype)
    to_mask = (weight * k[3]).add_(k[2]).mul_(grad)
    under = threshold(one.mask, one.threshold) * grad
    terms = grad * weight, grad, under, under * weight
    return to_mask, torch.stack([term.sum_to_size(k.shape[1:]) for term in terms]).to(one.k.dtype)


def _suits_loops(one: Operands) -> bool:
    """Float32 on a CPU, without gaps; elements in the order of their bits; and each k for one or for all filters."""
    weight, mask = one.weight, one.mask
    if weight.device.type != "cpu" or mask.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if any(size > 1 for size in one.k.shape[2:]) or torch.compiler.is_compiling() or weight.dim() < 2:
        return False
    if not all(type(tensor) in (Tensor, nn.Parameter) for tensor in (weight, mask)):
        return False
    if one.is_packed:
        return weight.is_contiguous() and mask.is_contiguous()
    return mask.dtype == weight.dtype and mask.stride() == weight.stride() and _is_dense(weight)


def _is_dense(tensor: Tensor) -> bool:
    """The elements fill a stretch of memory without gaps, filter by filter."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    return tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _is_transposed(weight: Tensor, grad: Tensor) -> bool:
    """The gradient has the channels last, and the weight has not."""
    channels_last = weight.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    return channels_last and weight.stride() != grad.stride() and weight.is_contiguous()

"""Masks of earlier tasks mixed into a new one's weights, for two numbers a layer each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.transforms.affine import Operands, compute
from bitgraft.transforms.base import Transform, expect, strided_like, widened
from bitgraft.transforms.bits import unpack
from bitgraft.transforms.masked import Masked

PART = "borrowed"  # what a file calls the k of earlier tasks' masks


def mixed(weight: Tensor, masks: Sequence[Tensor], k: Tensor) -> Tensor:
    """The sum over earlier tasks j of k2j Mj + k3j W∘Mj, in the order given; masks are packed, k is (tasks, 2).

    Each term is equation (2) with k0 = k1 = 0, so it takes the same compiled loops, with the same last bit.
    """
    total = torch.zeros_like(weight)
    for packed, row in zip(masks, k, strict=True):
        total += compute([Operands(weight, packed, F.pad(row, (2, 0)))])[0]
    return total


class LearnedMix(torch.autograd.Function):
    """`mixed` with its gradient to k. Saves W and the packed masks: no copy."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, weight: Tensor, *masks: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *masks)
        return mixed(weight, masks, k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *masks = ctx.saved_tensors
        rows = []
        for packed in masks:
            under = strided_like(weight, unpack(packed, weight.shape)) * grad
            rows.append(torch.stack([under.sum(), (under * weight).sum()]))
        return torch.stack(rows).float(), None, *(None for _ in masks)


class Borrowing(Transform):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M, and for each earlier task j the term k2j Mj + k3j W∘Mj.

    The k2j and k3j are one number a layer and begin at 0, so W~ begins as without them. The Mj are those that the
    earlier tasks hold, which are frozen; they are not copied, and neither learned nor saved here.
    """

    borrowed: nn.Parameter

    def __init__(self, own: Masked, earlier: Sequence[Masked], device: torch.device) -> None:
        super().__init__()
        self.own = own
        self.borrowed = nn.Parameter(torch.zeros(len(earlier), 2, device=device))
        self._earlier = tuple(earlier)  # in a tuple, where modules do not look: they are other tasks' own

    def forward(self, weight: Tensor) -> Tensor:
        wide = widened(weight)
        masks = [mask.packed.to(weight.device) for mask in self._earlier if mask.packed is not None]
        transformed: Tensor = self.own(wide) + LearnedMix.apply(self.borrowed, wide, *masks)
        return transformed.to(weight.dtype)

    def role(self, parameter: str) -> str:
        return "k" if parameter == PART else self.own.role(parameter.removeprefix("own."))

    def bits(self, *, statistics: bool = False) -> int:
        return self.own.bits(statistics=statistics) + 32 * self.borrowed.numel()

    def freeze(self) -> None:
        self.own.freeze()
        self.requires_grad_(False)

    def parts(self) -> dict[str, Tensor]:
        return {**self.own.parts(), PART: self.borrowed.detach()}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        here = {PART: parts[PART]} if PART in parts else {}
        expect({PART: (len(self._earlier), 2)}, here)
        self.own.restore({name: tensor for name, tensor in parts.items() if name != PART})
        self.borrowed = nn.Parameter(here[PART])
        self.freeze()


def own_mask(transform: nn.Module | None) -> Masked | None:
    """The mask that a transform has learned itself, if there is one."""
    if isinstance(transform, Borrowing):
        return transform.own
    return transform if isinstance(transform, Masked) else None

"""Reuse of earlier tasks' masks in a new task, at the cost of two numbers per mask and layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.transforms.affine import Operands, compute
from bitgraft.transforms.base import Weight, widened
from bitgraft.transforms.masked import Masked, MaskRule

PART = "borrowed"  # the file's name for the k of borrowed masks


def borrowed_terms(weight: Tensor, masks: Sequence[Tensor], k: Tensor) -> Tensor:
    """Return the sum over earlier tasks j of k2j Mj + k3j W∘Mj, for packed masks and k of shape (tasks, 2).

    Each term is equation (2) with k0 = k1 = 0, so it runs in the same compiled loops, with the same last bit.
    """
    total = torch.zeros_like(weight)
    for packed, row in zip(masks, k, strict=True):
        total += compute([Operands(weight, packed, F.pad(row, (2, 0)))])[0]
    return total


class Borrowing(Masked):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M, plus k2j Mj + k3j W∘Mj for each earlier task j.

    Each k2j and k3j is one number per layer that starts at 0. The Mj are the frozen masks of the earlier tasks: they
    are neither copied, trained nor saved here.
    """

    borrowed: nn.Parameter

    def __init__(self, weight: Weight, rule: MaskRule, scores: Tensor | None, earlier: Sequence[Masked]) -> None:
        super().__init__(weight, rule, scores)
        self.borrowed = nn.Parameter(torch.zeros(len(earlier), 2, device=None if scores is None else scores.device))
        self._earlier = tuple(earlier)  # a tuple, so that they are not registered as submodules

    def forward(self, weight: Tensor) -> Tensor:
        wide = widened(weight)
        masks = [mask.packed.to(weight.device) for mask in self._earlier if mask.packed is not None]
        result: Tensor = super().forward(wide) + borrowed_terms(wide, masks, self.borrowed)
        return result.to(weight.dtype)

    def role(self, parameter: str) -> str:
        return "k" if parameter == PART else parameter

    def bits(self, *, statistics: bool = False) -> int:
        return super().bits() + 32 * self.borrowed.numel()

    def parts(self) -> dict[str, Tensor]:
        return super().parts() | {PART: self.borrowed.detach()}

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        return super()._part_shapes() | {PART: (len(self._earlier), 2)}

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        super()._hold(parts)
        self.borrowed = nn.Parameter(parts[PART], requires_grad=False)

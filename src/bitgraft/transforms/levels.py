"""A change in few bits: whole steps, most of them none, which an entropy coder stores in as many bits as they say."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.errors import TaskError
from bitgraft.transforms.base import Transform, Weight, expect, widened

MOST = 127  # steps to either side
NO_STEP = 1e30  # a cell so wide that nothing takes a step
DEAD = 0.65  # of a cell: a change that is smaller takes no step (0.5 would be plain rounding)


def quantized(change: Tensor, cell: Tensor | float) -> Tensor:
    """The whole steps nearest to a change, a little nearer to none: entropy falls faster than the error grows."""
    return (change.abs() / cell).add_(1 - DEAD).floor_().clamp_(max=MOST).copysign_(change)


def entropy(counts: Tensor) -> Tensor:
    """Bits for each element, by row, of how often there are so many steps to either side."""
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    bits: Tensor = torch.special.entr(shares).sum(-1) / math.log(2) + 1 - shares[..., 0]
    return bits


class Through(torch.autograd.Function):
    """A value in R's place, with R's gradient (straight-through)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


class Levels(Transform):
    """W~ = W + step Q, where Q are whole numbers, most of them 0.

    While it learns it holds R (`scores`), what fine-tuning would add to W, and the width of a cell; Q is R in whole
    cells, and the step is the one that brings step Q nearest to R. Frozen, it holds Q in 8 bits and the step.
    """

    scores: nn.Parameter | None
    cell: Tensor | None
    levels: Tensor | None
    step: Tensor | None
    hardness = 1.0
    """In training mode, at 0 W~ = W + R; at 1 it is W + step Q; in between a mixture."""

    def __init__(self, weight: Weight, scores: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("scores", None if scores is None else nn.Parameter(scores))
        self.register_buffer("cell", None if scores is None else torch.tensor(NO_STEP, device=scores.device))
        self.register_buffer("levels", None)
        self.register_buffer("step", None)

    def forward(self, weight: Tensor) -> Tensor:
        change = self.change()
        if self.scores is not None:
            soft = 1 - self.hardness if self.training else 0.0
            mixed = change if soft == 0 else change.mul_(self.hardness).add_(self.scores.detach(), alpha=soft)
            change = Through.apply(self.scores, mixed)
        return (widened(weight) + change.view(weight.shape)).to(weight.dtype)

    @torch.no_grad()
    def change(self) -> Tensor:
        """step Q."""
        if self.scores is None:
            assert self.levels is not None
            assert self.step is not None
            return self.levels.to(self.step.dtype) * self.step
        levels = self._levels()
        return levels * self._step(levels)

    def _levels(self) -> Tensor:
        assert self.scores is not None
        assert self.cell is not None
        return quantized(self.scores.detach(), self.cell)

    def _step(self, levels: Tensor) -> Tensor:
        """By least squares."""
        assert self.scores is not None
        size = torch.linalg.vecdot(levels.flatten(), levels.flatten())
        step: Tensor = torch.linalg.vecdot(self.scores.detach().flatten(), levels.flatten()) / size.clamp(min=1)
        return step

    def role(self, parameter: str) -> str:
        return parameter

    def bits(self, *, statistics: bool = False) -> int:
        counts = torch.bincount(self.parts()["levels"].abs().flatten().int(), minlength=1)
        return math.ceil(self.weight.shape.numel() * float(entropy(counts))) + 32

    def freeze(self) -> None:
        if self.scores is not None:
            self._hold(**self.parts())

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        if self.levels is not None and self.step is not None:
            return {"levels": self.levels, "step": self.step}
        if self.scores is not None:
            levels = self._levels()
            return {"levels": levels.to(torch.int8), "step": self._step(levels)}
        kinds = {"levels": torch.int8, "step": torch.float32}  # values are still to come: sizes alone
        return {name: torch.empty(size, dtype=kinds[name], device="meta") for name, size in self._sizes().items()}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        expect(self._sizes(), parts)
        self._hold(parts["levels"], parts["step"])

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"levels": tuple(self.weight.shape), "step": ()}

    def _hold(self, levels: Tensor, step: Tensor) -> None:
        self.scores = self.cell = None
        self.levels, self.step = levels, step

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if (self.scores is None) == (f"{prefix}scores" in state_dict):
            raise TaskError(f"{self.weight.name!r} is frozen here and learns in this state, or the reverse")
        super()._load_from_state_dict(state_dict, prefix, *args)


def keep_to(levels: Sequence[Levels], bits: float, vectors: Sequence[Tensor], others: float | None) -> None:
    """Choose the cells so that a file takes so many bits for each weight, of which others take some.

    As long as it is not known how many, a file's header has about 1000 bytes and 86 for each tensor, and norm layers
    take 5 bits for each value.
    """
    weights = sum(one.weight.shape.numel() for one in levels)
    if others is None:
        others = 8 * (1000 + 86 * (len(levels) + len(vectors))) + 5 * sum(vector.numel() for vector in vectors)
        if others >= bits * weights:
            raise TaskError(
                f"bits={bits} cannot be met: norm layers and the header alone take about {others / weights:.2f} bits "
                f"for each of {weights:,} weights; give more bits, or norms=False"
            )
    spend(levels, max(0.0, bits * weights - others))


@torch.no_grad()
def spend(levels: Sequence[Levels], budget: float, sample: int = 1 << 11) -> None:
    """Choose the cells so that all Q together take about so many bits, judged by a sample of each weight.

    A cell grows with the square root of the size of its weight's R: between one cell for all, which has the least
    squared error for the bits, and the same relative error everywhere.
    """
    changes = [one.scores.detach().flatten() for one in levels if one.scores is not None]
    some = [change[:: max(1, len(change) // sample)] for change in changes]
    sizes = torch.stack([change.square().mean() for change in some]) ** 0.25
    rows = torch.repeat_interleave(torch.arange(len(some)), torch.tensor([len(part) for part in some])).to(sizes.device)
    relative = torch.cat(some) / sizes[rows].clamp(min=1e-30)
    counts = sizes.new_tensor([change.numel() for change in changes])
    low, high = (sizes.new_tensor(edge) for edge in (-20.0, 10.0))  # log2 of a cell for R of size 1
    for _ in range(16):
        middle = (low + high) / 2
        steps = quantized(relative, 2**middle).abs_().int()
        found = torch.bincount((rows * (MOST + 1)).add_(steps), minlength=len(some) * (MOST + 1))
        over = (entropy(found.view(len(some), -1)) * counts).sum() > budget
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    for one, size in zip(levels, sizes, strict=True):
        assert one.cell is not None
        one.cell.copy_(torch.where(size > 0, 2**high * size, NO_STEP))

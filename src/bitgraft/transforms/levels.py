"""A quantized change of a weight, mostly zeros, which an entropy coder stores in a fraction of a bit per weight."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.errors import TaskError
from bitgraft.transforms.base import ScoredTransform, Weight, widened
from bitgraft.transforms.bits import pack, unpack

MAX_LEVEL = 127
ALL_ZERO = 1e30  # a cell so wide that every level is 0
DEAD_ZONE = 0.65  # in cells: a smaller change becomes 0 (0.5 would be plain rounding)


def quantize(change: Tensor, cell: Tensor | float) -> Tensor:
    """Round a change to whole cells, biased towards 0: entropy falls faster than the error grows."""
    return (change.abs() / cell).add_(1 - DEAD_ZONE).floor_().clamp_(max=MAX_LEVEL).copysign_(change)


def entropy(counts: Tensor) -> Tensor:
    """Return bits per element, by row, from the counts of each absolute level: its entropy, plus a sign unless 0."""
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    bits: Tensor = torch.special.entr(shares).sum(-1) / math.log(2) + 1 - shares[..., 0]
    return bits


class StraightThrough(torch.autograd.Function):
    """Return a value in place of R, and pass its gradient to R unchanged."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


class Levels(ScoredTransform):
    """W~ = W + step Q with integer levels Q, most of them 0.

    In training it holds R (`scores`), the change that fine-tuning would make, and the width of a cell. Q is R rounded
    to whole cells, and `step` is the least-squares fit of step Q to R. Frozen, it holds `step`, and Q as one bit per
    weight for what is not 0 (`changed`) and a byte for each of these (`values`).
    """

    cell: Tensor | None
    changed: Tensor | None
    values: Tensor | None
    step: Tensor | None

    def __init__(self, weight: Weight, scores: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("scores", None if scores is None else nn.Parameter(scores))
        self.register_buffer("cell", None if scores is None else torch.tensor(ALL_ZERO, device=scores.device))
        for name in ("changed", "values", "step"):
            self.register_buffer(name, None)

    def forward(self, weight: Tensor) -> Tensor:
        change = self.change()
        if self.scores is not None:
            soft = 1 - self.hardness if self.training else 0.0
            mixed = change if soft == 0 else change.mul_(self.hardness).add_(self.scores.detach(), alpha=soft)
            change = StraightThrough.apply(self.scores, mixed)
        return (widened(weight) + change.view(weight.shape)).to(weight.dtype)

    def changes(self) -> list[nn.Parameter]:
        return [] if self.scores is None else [self.scores]

    def change(self) -> Tensor:
        """Return step Q."""
        levels, step = self._quantized()
        return levels.to(step.dtype) * step

    @torch.no_grad()
    def _quantized(self) -> tuple[Tensor, Tensor]:
        """Return Q and its step."""
        if self.changed is not None and self.values is not None and self.step is not None:
            levels = torch.zeros(self.weight.shape, dtype=torch.int8, device=self.values.device)
            return levels.masked_scatter_(unpack(self.changed, self.weight.shape), self.values), self.step
        assert self.scores is not None
        assert self.cell is not None
        levels = quantize(self.scores.detach(), self.cell)
        flat = levels.flatten()
        square = torch.linalg.vecdot(flat, flat)
        return levels, torch.linalg.vecdot(self.scores.detach().flatten(), flat) / square.clamp(min=1)

    def bits(self, *, statistics: bool = False) -> int:
        counts = torch.bincount(self.parts()["levels"].abs().flatten().int(), minlength=1)
        return math.ceil(self.weight.shape.numel() * float(entropy(counts))) + 32

    def parts(self) -> dict[str, Tensor]:
        levels, step = self._quantized()
        return {"levels": levels.to(torch.int8), "step": step}

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"levels": tuple(self.weight.shape), "step": ()}

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        self.scores = self.cell = None
        levels = parts["levels"]
        changed = levels != 0
        self.changed, self.values, self.step = pack(changed), levels[changed], parts["step"]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}values")
        if given is not None and self.values is not None:
            self.values = self.values.new_empty(given.shape)  # another number of changed weights
        super()._load_from_state_dict(state_dict, prefix, *args)


def fit_cells_to_file(levels: Sequence[Levels], bits: float, vectors: Sequence[Tensor], others: float | None) -> None:
    """Choose the cells so that the task file takes `bits` per weight, of which everything but Q takes `others` in all.

    If `others` is None it is estimated: 1000 bytes of header plus 86 per tensor, and 6 bits per value of the norm
    layers' `vectors`.
    """
    weights = sum(one.weight.shape.numel() for one in levels)
    if others is None:
        others = 8 * (1000 + 86 * (len(levels) + len(vectors))) + 6 * sum(vector.numel() for vector in vectors)
        if others >= bits * weights:
            raise TaskError(
                f"bits={bits} cannot be met: norm layers and the header alone take about {others / weights:.2f} bits "
                f"for each of {weights:,} weights; give more bits, or norms=False"
            )
    fit_cells(levels, max(0.0, bits * weights - others))


@torch.no_grad()
def fit_cells(levels: Sequence[Levels], budget: float, sample: int = 1 << 11) -> None:
    """Choose the cells so that all Q together take about `budget` bits, estimated from a sample of each weight.

    A cell is proportional to the square root of the RMS of its weight's R. This is halfway between one cell for all,
    which minimises the squared error, and the same relative error everywhere. It is never so small that the largest
    change would take more than MAX_LEVEL steps.
    """
    changes = [one.scores.detach().flatten() for one in levels if one.scores is not None]
    samples = [change[:: max(1, len(change) // sample)] for change in changes]
    sizes = torch.stack([change.square().mean() for change in samples]) ** 0.25
    lengths = torch.tensor([len(part) for part in samples])
    rows = torch.repeat_interleave(torch.arange(len(samples)), lengths).to(sizes.device)
    scale = sizes.clamp(min=1e-30)
    relative = torch.cat(samples) / scale[rows]
    smallest = torch.stack([torch.linalg.vector_norm(change, math.inf) for change in changes]) / MAX_LEVEL / scale
    numels = sizes.new_tensor([change.numel() for change in changes])
    low, high = (sizes.new_tensor(edge) for edge in (-20.0, 10.0))  # log2 of the cell for an R of size 1
    for _ in range(16):
        middle = (low + high) / 2
        steps = quantize(relative, torch.maximum(2**middle, smallest)[rows]).abs_().int()
        counts = torch.bincount((rows * (MAX_LEVEL + 1)).add_(steps), minlength=len(samples) * (MAX_LEVEL + 1))
        over = (entropy(counts.view(len(samples), -1)) * numels).sum() > budget
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    cells = torch.where(sizes > 0, torch.maximum(2**high, smallest) * scale, ALL_ZERO)
    for one, cell in zip(levels, cells, strict=True):
        assert one.cell is not None
        one.cell.copy_(cell)

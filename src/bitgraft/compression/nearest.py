"""The mask and the four k whose W~ is nearest to a given weight T, by squared distance.

With the mask given, k solves four normal equations. With k given, every bit is the nearer of two values. Neither step
can make the distance larger, so taking them in turns goes down until it stops, as Lloyd's algorithm does. Where it
stops depends on where it began; it begins in three ways, and the best goes on.

Everything is in terms of the change D = T - W, which is small beside W, and of c = k - (1, 0, 0, 0): then
D ~ c0 W + c1 1 + c2 M + c3 W∘M. A weight is a matrix with a row for each set of k: one for the layer, or one for each
of its output channels. Sums are in float64, and a turn is one pass over memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitgraft.transforms.masked import START

FEW, MOST = 3, 30  # turns from every beginning, and from the best of them
ENOUGH = 1e-4  # a turn that gains less than this share of the distance is the last
SINGULAR = 1e-10  # eigenvalues below this share count as 0: k is kept in float32, where such terms would not cancel
BLOCK = 1 << 16  # elements at a time: some float64 arrays of so many stay in a processor's cache

Fixed = Sequence[float | None]
"""Each of k0..k3 where it is a constant, None where it is free."""
Place = tuple[slice, slice]


@dataclass(frozen=True)
class Nearest:
    k: Tensor
    """float32, (4, rows)."""
    mask: Tensor
    """The best one for these k, (rows, columns)."""
    margin: Tensor
    """How far T is from where the bit would change, in the units of the weight; float32, never negative."""


def nearest(weight: Tensor, target: Tensor, fixed: Fixed) -> Nearest:
    """The nearest W~ to the target, both given as matrices with one row for each set of k."""
    totals = sums_over_all(weight, target)
    candidates = [descend(weight, target, totals, fixed, start, FEW) for start in beginnings(totals)]
    errors = torch.stack([error for _, error in candidates])  # (beginnings, rows)
    best = torch.stack([c for c, _ in candidates])[errors.argmin(0), torch.arange(len(weight))]  # (rows, 4)
    best, _ = descend(weight, target, totals, fixed, best, MOST)
    k = rounded(best, fixed)
    mask, margin = decided(weight, target, k.double() - torch.tensor(START))
    return Nearest(k.t().contiguous(), mask, margin)


def descend(
    weight: Tensor, target: Tensor, totals: Tensor, fixed: Fixed, start: Tensor, turns: int
) -> tuple[Tensor, Tensor]:
    """Take turns, from the mask that belongs to `start` (which need not keep to `fixed`): c, and its error by row."""
    sums, _ = sweep(weight, target, start)
    best = solve(totals, sums, fixed)
    sums, least = sweep(weight, target, best)
    for _ in range(turns - 1):
        c = solve(totals, sums, fixed)
        sums, error = sweep(weight, target, c)
        gain = least - error
        best = torch.where((gain > 0)[:, None], c, best)
        least = torch.minimum(least, error)
        if bool((gain <= ENOUGH * least).all()):
            break
    return best, least


def beginnings(totals: Tensor) -> list[Tensor]:
    """Values of c to begin with, whose masks are: where the change is positive; where it is so after what W and 1
    explain of it is taken off; and where that has the sign of W, so that some weights grow and others shrink."""
    line = solve(totals, torch.zeros_like(totals), (None, None, 0.0, 0.0))
    sign, growth = line.new_tensor([0, -1, 2, 0]), line.new_tensor([-1, 0, 0, 2])
    return [sign.expand_as(line), line + sign, line + growth]


def solve(totals: Tensor, under: Tensor, fixed: Fixed) -> Tensor:
    """c by least squares, (rows, 4), from sums over all elements and over those whose bit is 1.

    Where the equations leave something open (all bits alike, W constant or 0, fewer elements than k) the smallest
    solution is taken.
    """
    n, w, ww, d, wd = totals
    n1, w1, ww1, d1, wd1 = under
    grams = torch.stack([ww, w, w1, ww1, w, n, n1, w1, w1, n1, n1, w1, ww1, w1, w1, ww1], 1).view(-1, 4, 4)
    right = torch.stack([wd, d, d1, wd1], 1)
    c = constants(fixed).expand_as(right).clone()
    free = [index for index, value in enumerate(fixed) if value is None]
    if not free:
        return c
    right = (right - (grams @ c[:, :, None]).squeeze(2))[:, free]
    grams = grams[:, free][:, :, free]
    scale = grams.diagonal(dim1=1, dim2=2)
    scale = torch.where(scale > 0, scale, 1.0).rsqrt()  # columns of one length, so that "small" has a meaning
    inverse = torch.linalg.pinv(grams * scale[:, :, None] * scale[:, None], hermitian=True, rtol=SINGULAR)
    c[:, free] = (inverse @ (right * scale)[:, :, None]).squeeze(2) * scale
    return c


def constants(fixed: Fixed) -> Tensor:
    """c where k is a constant; 0 where it is free."""
    return torch.tensor(
        [0.0 if k is None else k - start for k, start in zip(fixed, START, strict=True)], dtype=torch.float64
    )


def rounded(c: Tensor, fixed: Fixed) -> Tensor:
    """k in float32, (rows, 4). What float32 cannot hold stays where it began."""
    k = (c + torch.tensor(START, dtype=torch.float64)).float()
    start = (constants(fixed) + torch.tensor(START, dtype=torch.float64)).float()
    return torch.where(k.isfinite().all(1, keepdim=True), k, start)


def sweep(weight: Tensor, target: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """With the best mask for c: the sums over elements whose bit is 1, (5, rows), and the squared error by row."""
    sums, errors = torch.zeros(5, len(weight), dtype=torch.float64), torch.zeros(len(weight), dtype=torch.float64)
    for place, w, d in _blocks(weight, target):
        rest, gap = _choice(w, d, c[place[0]])
        bits = _bits(rest, gap).double()
        sums[:, place[0]] += _sums(w, d, bits)
        errors[place[0]] += rest.sub_(gap.mul_(bits)).square_().sum(1)
    return sums, errors


def sums_over_all(weight: Tensor, target: Tensor) -> Tensor:
    """The sums of 1, W, W², D and WD, (5, rows)."""
    sums = torch.zeros(5, len(weight), dtype=torch.float64)
    for place, w, d in _blocks(weight, target):
        sums[:, place[0]] += _sums(w, d, torch.ones_like(w))
    return sums


def decided(weight: Tensor, target: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The best mask for c, and how far D is from the middle between its two values."""
    mask, margin = torch.empty(weight.shape, dtype=torch.bool), torch.empty(weight.shape)
    for place, w, d in _blocks(weight, target):
        rest, gap = _choice(w, d, c[place[0]])
        mask[place] = _bits(rest, gap)
        margin[place] = (rest - gap / 2).abs()
    return mask, margin


def _blocks(weight: Tensor, target: Tensor) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """W and D in float64, some rows and columns at a time."""
    count, length = weight.shape
    step = max(1, BLOCK // max(1, length))
    for row in range(0, count, step):
        for column in range(0, length, BLOCK):
            place = (slice(row, row + step), slice(column, column + BLOCK))
            w = weight[place].double()
            yield place, w, target[place].double().sub_(w)


def _choice(w: Tensor, d: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of D with a bit of 0, and how much a bit of 1 takes off that."""
    c0, c1, c2, c3 = c[:, :, None].unbind(1)
    return d - (w * c0).add_(c1), (w * c3).add_(c2)


def _bits(rest: Tensor, gap: Tensor) -> Tensor:
    """Where |rest - gap| < |rest|."""
    return gap * (2 * rest - gap) > 0


def _sums(w: Tensor, d: Tensor, bits: Tensor) -> Tensor:
    some = w * bits
    dot = torch.linalg.vecdot
    return torch.stack([bits.sum(1), some.sum(1), dot(w, some), dot(d, bits), dot(d, some)])

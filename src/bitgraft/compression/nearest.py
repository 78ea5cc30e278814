"""The mask and the four k whose W~ is nearest to a given weight T, by squared distance.

With the mask given, k solves four normal equations. With k given, every bit is the nearer of two values. Neither step
can increase the distance, so alternating them descends until it stops, as in Lloyd's algorithm. Where it stops depends
on where it starts: it starts in three ways, and the best one continues.

Everything is in terms of the change D = T - W, which is small beside W, and of c = k - (1, 0, 0, 0): then
D ~ c0 W + c1 1 + c2 M + c3 W∘M. A weight is a matrix with a row for each set of k: one for the layer, or one for each
of its output channels. Sums are in float64, and an iteration is one pass over memory.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitgraft.transforms.masked import START

TRIAL, MOST = 3, 30  # iterations from each start, and from the best of them
TOLERANCE = 1e-4  # an iteration that gains less than this share of the distance is the last
SINGULAR = 1e-10  # eigenvalues below this share count as 0: k is kept in float32, where such terms would not cancel
BLOCK = 1 << 16  # elements at a time: float64 arrays stay in the cache, and a large layer takes little memory
ROWS_BLOCK = 1 << 20  # elements at a time where whole rows are sorted
BALANCE = 1.0
"""The weight of a filter's squared summed error beside the sum of its squared errors: right for inputs whose mean is as
large as their deviation. Results hardly depend on it."""

Fixed = Sequence[float | None]
"""Each of k0..k3 where it is a constant, None where it is free."""
Place = tuple[slice, slice]


class Nearest(NamedTuple):
    k: Tensor  # float32, (4, rows)
    mask: Tensor  # the best one for these k, (rows, columns)
    margin: Tensor  # how far T is from where the bit would change, in the units of the weight; float32


def nearest(weight: Tensor, target: Tensor, fixed: Fixed) -> Nearest:
    """The nearest W~ to the target, both given as matrices with one row for each set of k."""
    totals, _ = sweep(weight, target)
    trials = [descend(weight, target, totals, fixed, c, TRIAL) for c in starts(totals)]
    errors = torch.stack([error for _, error in trials])  # (starts, rows)
    best = torch.stack([c for c, _ in trials])[errors.argmin(0), torch.arange(len(weight))]  # (rows, 4)
    best, _ = descend(weight, target, totals, fixed, best, MOST)
    origin = torch.tensor(START, dtype=torch.float64)
    k = (best + origin).float()
    k = torch.where(k.isfinite().all(1, keepdim=True), k, (_constants(fixed) + origin).float())
    mask, margin = torch.empty(weight.shape, dtype=torch.bool), torch.empty(weight.shape)
    for place, w, d in _blocks(weight, target):
        rest, gap = _choice(w, d, (k.double() - origin)[place[0]])
        mask[place] = _bits(rest, gap)
        margin[place] = (rest - gap / 2).abs()
    return Nearest(k.t().contiguous(), mask, margin)


def descend(
    weight: Tensor, target: Tensor, totals: Tensor, fixed: Fixed, start: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The best c and its error by row, from the mask that belongs to `start` (which need not keep to `fixed`)."""
    sums, _ = sweep(weight, target, start)
    best = solve(totals, sums, fixed)
    sums, least = sweep(weight, target, best)
    for _ in range(iterations - 1):
        c = solve(totals, sums, fixed)
        sums, error = sweep(weight, target, c)
        gain = least - error
        best = torch.where((gain > 0)[:, None], c, best)
        least = torch.minimum(least, error)
        if bool((gain <= TOLERANCE * least).all()):
            break
    return best, least


def starts(totals: Tensor) -> list[Tensor]:
    """Three values of c. Their masks mark where the change is positive; where what W and 1 do not explain of it is
    positive; and where that has the sign of W, so that some weights grow and others shrink."""
    line = solve(totals, torch.zeros_like(totals), (None, None, 0.0, 0.0))
    sign, growth = line.new_tensor([0, -1, 2, 0]), line.new_tensor([-1, 0, 0, 2])
    return [sign.expand_as(line), line + sign, line + growth]


def solve(totals: Tensor, ones: Tensor, fixed: Fixed) -> Tensor:
    """c by least squares, (rows, 4), from sums over all elements and over those whose bit is 1.

    Where the equations are singular (all bits alike, W constant or 0, fewer elements than k) the smallest solution is
    taken.
    """
    n, w, ww, d, wd = totals
    n1, w1, ww1, d1, wd1 = ones
    grams = torch.stack([ww, w, w1, ww1, w, n, n1, w1, w1, n1, n1, w1, ww1, w1, w1, ww1], 1).view(-1, 4, 4)
    right = torch.stack([wd, d, d1, wd1], 1)
    c = _constants(fixed).expand_as(right).clone()
    free = [index for index, value in enumerate(fixed) if value is None]
    if not free:
        return c
    right = (right - (grams @ c[:, :, None]).squeeze(2))[:, free]
    grams = grams[:, free][:, :, free]
    scale = grams.diagonal(dim1=1, dim2=2)
    scale = torch.where(scale > 0, scale, 1.0).rsqrt()  # columns of one length, so that SINGULAR has a meaning
    inverse = torch.linalg.pinv(grams * scale[:, :, None] * scale[:, None], hermitian=True, rtol=SINGULAR)
    c[:, free] = (inverse @ (right * scale)[:, :, None]).squeeze(2) * scale
    return c


def _constants(fixed: Fixed) -> Tensor:
    """c where k is a constant; 0 where it is free."""
    values = [0.0 if k is None else k - start for k, start in zip(fixed, START, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def sweep(weight: Tensor, target: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """With the best mask for c: the sums of 1, W, W², D and WD over elements whose bit is 1, (5, rows), and the squared
    error by row. Without c, all bits are 1."""
    sums, errors = torch.zeros(5, len(weight), dtype=torch.float64), torch.zeros(len(weight), dtype=torch.float64)
    for (rows, _), w, d in _blocks(weight, target):
        rest, gap = _choice(w, d, c[rows]) if c is not None else (d, torch.zeros_like(d))
        bits = _bits(rest, gap).double() if c is not None else torch.ones_like(d)
        some, dot = w * bits, torch.linalg.vecdot
        sums[:, rows] += torch.stack([bits.sum(1), some.sum(1), dot(w, some), dot(d, bits), dot(d, some)])
        errors[rows] += rest.sub_(gap.mul_(bits)).square_().sum(1)
    return sums, errors


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


def balancing_flips(weight: Tensor, target: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The bits to flip so that the errors in each filter cancel, for matrices with one filter per row; k is (4, 1) or
    (4, rows).

    Inputs have a mean of their own (after a ReLU none is negative), so a filter whose errors do not sum to 0 shifts its
    output on every image. Weights near the middle between their two values cost little to flip, and few of them cancel
    the sum.
    """
    flips, step = torch.empty_like(mask), max(1, ROWS_BLOCK // max(1, weight.shape[1]))
    values = k.double().expand(4, len(weight))[:, :, None]
    for row in range(0, len(weight), step):
        rows = slice(row, row + step)
        w, bits = weight[rows].double(), mask[rows]
        k0, k1, k2, k3 = values[:, rows]
        gap = k3 * w + k2
        flips[rows] = _cheapest(target[rows].double() - (k0 * w + k1 + gap * bits), torch.where(bits, -gap, gap))
    return flips


def _cheapest(rest: Tensor, step: Tensor) -> Tensor:
    """Which bits to flip, given T - W~ and how far each flip moves W~: the cheapest first, as long as it pays."""
    total = rest.sum(1, keepdim=True)
    useful = step * total > 0
    price = torch.where(useful, step * (step - 2 * rest), 0.0)  # (rest - step)² - rest²
    order = torch.where(useful, price / step.abs(), torch.inf).argsort(1)
    moved = torch.where(useful, step, 0.0).gather(1, order).cumsum(1)
    cost = price.gather(1, order).cumsum(1) + BALANCE * (total - moved).square()
    least, last = cost.min(1, keepdim=True)
    count = torch.where(least < BALANCE * total.square(), last + 1, 0)
    chosen = torch.arange(rest.shape[1]).expand_as(order) < count
    return torch.zeros_like(chosen).scatter_(1, order, chosen) & useful

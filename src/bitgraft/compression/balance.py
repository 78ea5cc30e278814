"""Bits that are turned so that the errors in a filter cancel.

What reaches a layer has a mean of its own (behind a ReLU nothing is negative), and a filter whose errors do not sum to
0 shifts its output by that on every image: the one thing that the rest of the network is not used to. The weights
nearest to the middle between their two values are as good as undecided; turning few of them cancels the sum.
"""

import torch
from torch import Tensor

WEIGHT = 1.0
"""How much the square of a filter's summed error counts beside the sum of its squares: as it does for inputs whose mean
is as large as their deviation. Results hardly depend on it."""
BLOCK = 1 << 20  # elements at a time, in whole filters


def unbalanced(weight: Tensor, target: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The bits to turn, for matrices with one filter per row and k for all, (4, 1), or for each of them."""
    turned, step = torch.empty_like(mask), max(1, BLOCK // max(1, weight.shape[1]))
    values = k.double().expand(4, len(weight))[:, :, None]
    for row in range(0, len(weight), step):
        rows = slice(row, row + step)
        w, bits = weight[rows].double(), mask[rows]
        k0, k1, k2, k3 = values[:, rows]
        gap = k3 * w + k2
        turned[rows] = turns(target[rows].double() - (k0 * w + k1 + gap * bits), torch.where(bits, -gap, gap))
    return turned


def turns(rest: Tensor, step: Tensor) -> Tensor:
    """Which bits to turn, given what W~ lacks and by how much it would move: the cheapest first, as long as it pays."""
    total = rest.sum(1, keepdim=True)
    useful = step * total > 0
    price = torch.where(useful, step * (step - 2 * rest), 0.0)  # (rest - step)² - rest²
    order = torch.where(useful, price / step.abs(), torch.inf).argsort(1)
    moved = torch.where(useful, step, 0.0).gather(1, order).cumsum(1)
    cost = price.gather(1, order).cumsum(1) + WEIGHT * (total - moved).square()
    least, last = cost.min(1, keepdim=True)
    count = torch.where(least < WEIGHT * total.square(), last + 1, 0)
    chosen = torch.arange(rest.shape[1]).expand_as(order) < count
    return torch.zeros_like(chosen).scatter_(1, order, chosen) & useful

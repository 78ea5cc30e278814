"""Estimate the mean input of each layer without data, from the norm layers of the fine-tuned copy.

Rounding a weight shifts the mean of its layer's output by the rounding error times the mean input m, on every image
alike; this is most of the damage. With T the copy's weights and D their change:

- If the norm's statistics moved, T m = running mean.
- If they are still the backbone's, the bias absorbed the change: D m s = old bias - new bias, with s the norm's scale.

Either is one linear equation per output channel. With fewer equations than inputs, m stays near a prior.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitgraft.task import Task
from bitgraft.transforms.base import Weight

PRIOR = 0.5  # about the mean of a standard normal variable after ReLU
NOISE = 0.03  # standard deviation of the equations, relative to that of the prior


def input_means(task: Task, names: list[str], copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean inputs of each named weight, in a shape that broadcasts against it."""
    found = {}
    ours = task.anatomy.tensors()
    for name in names:
        weight, scale = task.anatomy.weights[name], output_scale(task, name, copy)
        mean, bias = f"{weight.feeds}.running_mean", f"{weight.feeds}.bias"
        if torch.equal(ours[mean], copy[mean]):
            matrix = copy[name].double() - ours[name].detach().double()
            shift = ours[bias].detach().double() - copy[bias].double()
        else:
            matrix, shift = copy[name].double(), scale * copy[mean].double()
        if matrix.dim() > 2:
            matrix = matrix.flatten(2).sum(2)
        found[name] = solve_means(weight, matrix * scale[:, None], shift)
    return found


def output_scale(task: Task, name: str, copy: Mapping[str, Tensor]) -> Tensor:
    """Return the factor that the norm after a weight applies to each channel."""
    layer = str(task.anatomy.weights[name].feeds)
    norm: Any = task.anatomy.backbone.get_submodule(layer)
    scale: Tensor = copy[f"{layer}.weight"].double() * (copy[f"{layer}.running_var"].double() + norm.eps).rsqrt()
    return scale


def solve_means(weight: Weight, matrix: Tensor, shift: Tensor) -> Tensor:
    """Solve matrix m = shift by ridge regression towards the prior, for each group."""
    a = matrix.view(weight.groups, -1, matrix.shape[1])  # (groups, outputs, inputs)
    residual = shift.view(weight.groups, -1, 1) - PRIOR * a.sum(2, keepdim=True)
    system = a @ a.mT + NOISE**2 * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    mean = PRIOR + (a.mT @ torch.linalg.solve(system, residual)).squeeze(2)  # (groups, inputs)
    rows: Tensor = mean.repeat_interleave(a.shape[1], 0) if weight.groups > 1 else mean
    return rows.float().view(*rows.shape, *(1 for _ in weight.kernel))

"""Round a task to what a small file holds: k to 8 bits, norm layers to one scale and one shift in half precision."""

import math

import torch
from torch import Tensor, nn

from bitgraft.format.compact import PARTS
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.masked import Masked

STEPS = 255


@torch.no_grad()
def compact(task: Task) -> Task:
    """Freeze a task and round it to what its file holds in few bits. Evaluate it after this, not before.

    Each row of k goes to the nearest of 256 equal steps. A batch norm with statistics of its own becomes a scale and a
    shift, with mean 0 and variance 1, so it has nothing left to go on training with: save a task that is to be trained
    further without this. Nothing that is saved or loaded afterwards is rounded again.
    """
    task.freeze()
    if registry.get(task.metadata.method).owns_everything:
        return task  # a copy of the network, for which no bits are saved
    for module in task.modules():
        if isinstance(module, Masked) and module.rule.per_channel:
            module.constants = torch.stack([to_grid(row) for row in module.constants])
    for layer in task.anatomy.norms:
        _fold(task, layer)
    task.revision += 1
    task.is_compact = True
    return task


def to_grid(row: Tensor) -> Tensor:
    """The nearest values on a grid of 256 steps. All are multiples of a power of two, so float32 holds them exactly."""
    low, high = float(row.min()), float(row.max())
    if not high > low:
        return row
    apart = (high - low) / STEPS
    grain = 2.0 ** max(math.frexp(apart)[1] - 8, math.frexp(max(-low, high))[1] - 23)
    unit, first = math.ceil(apart / grain) * grain, round(low / grain) * grain
    return (first + unit * ((row.double() - first) / unit).round().clamp(0, STEPS)).float()


def _fold(task: Task, layer: str) -> None:
    """Let a batch norm that the task owns have mean 0 and variance 1, with its effect unchanged but for rounding."""
    norm, owned = task.anatomy.backbone.get_submodule(layer), task.owned
    names = [f"{layer}.{name}" for name in PARTS]
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not all(name in owned for name in names):
        return
    weight, bias, mean, var = (owned[name].double() for name in names)
    scale = weight * ((1 + norm.eps) / (var + norm.eps)).sqrt()
    shift = bias - mean * weight / (var + norm.eps).sqrt()
    rounded = [value.half() for value in (scale, shift)]
    if not all(torch.isfinite(value).all() for value in rounded):
        return  # half precision cannot hold it
    for name, value in zip(names, (*rounded, torch.zeros_like(mean), torch.ones_like(var)), strict=True):
        owned[name].copy_(value)

"""The mean of what a layer takes in, found without data: the norm layer behind it in the fine-tuned copy tells.

Weights that are rounded shift the mean of their layer's output on every image alike, by their error times the mean of
what comes in; most of what rounding costs is this. A norm layer whose statistics moved with the copy says T m = its
running mean. One whose statistics are still the backbone's had its bias make up for the change D of the weights, so
D m s = bias before - bias after, with s its scale. Either is a linear equation for each output channel. Where there are
fewer of them than inputs, the solution stays near a guess.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitgraft.task import Task
from bitgraft.transforms.base import Weight

GUESS = 0.5  # of a mean; about that of a normal variable behind a ReLU
NOISE = 0.03  # how far a norm's bias may have gone by itself, where the guess may be wrong by 1


def input_means(task: Task, names: list[str], copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each weight a tensor that broadcasts against it."""
    found = {}
    for name in names:
        weight = task.anatomy.weights[name]
        norm = {part: copy[f"{weight.feeds}.{part}"].double() for part in ("weight", "bias", "running_mean")}
        scale = output_scale(task, name, copy)
        ours = task.anatomy.tensors()
        if torch.equal(ours[f"{weight.feeds}.running_mean"], copy[f"{weight.feeds}.running_mean"]):
            matrix = copy[name].double() - ours[name].detach().double()
            told = ours[f"{weight.feeds}.bias"].detach().double() - norm["bias"]
        else:
            matrix, told = copy[name].double(), scale * norm["running_mean"]
        found[name] = solved(weight, (matrix.flatten(2).sum(2) if matrix.dim() > 2 else matrix) * scale[:, None], told)
    return found


def output_scale(task: Task, name: str, copy: Mapping[str, Tensor]) -> Tensor:
    """What the norm behind a weight multiplies each channel by."""
    layer = str(task.anatomy.weights[name].feeds)
    norm: Any = task.anatomy.backbone.get_submodule(layer)
    scale: Tensor = copy[f"{layer}.weight"].double() * (copy[f"{layer}.running_var"].double() + norm.eps).rsqrt()
    return scale


def solved(weight: Weight, matrix: Tensor, told: Tensor) -> Tensor:
    """The m nearest to the guess for which matrix m is as told, up to the noise: a ridge regression by group."""
    a = matrix.view(weight.groups, -1, matrix.shape[1])  # (groups, outputs, inputs)
    left = told.view(weight.groups, -1, 1) - GUESS * a.sum(2, keepdim=True)
    system = a @ a.mT + NOISE**2 * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    mean = GUESS + (a.mT @ torch.linalg.solve(system, left)).squeeze(2)  # (groups, inputs)
    rows: Tensor = mean.repeat_interleave(a.shape[1], 0) if weight.groups > 1 else mean
    return rows.float().view(*rows.shape, *(1 for _ in weight.kernel))

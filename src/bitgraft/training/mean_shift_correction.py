"""The mean of what weights take in, so that changes of weights can be levelled (`Task.correct_mean_shift`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitgraft.task import Task
from bitgraft.training.cpu.convolutions import is_simple, pair
from bitgraft.training.cpu.products import weight_gradient


def levelled(task: Task) -> list[str]:
    """The weights of convolutions that feed a norm layer of the task's own, which has a bias and running statistics."""
    return [
        name
        for name, weight in task.anatomy.weights.items()
        if weight.kind == "conv"
        and weight.feeds is not None
        and all(f"{weight.feeds}.{part}" in task.owned for part in ("weight", "bias", "running_var"))
    ]


class Inputs(TorchFunctionMode):
    """Within it, sums up what the kernels of convolutions take in. Kernels are known by their `id`."""

    def __init__(self, kernels: Mapping[int, str]) -> None:
        super().__init__()
        self.kernels = kernels
        self.sums: dict[str, Tensor] = {}
        self.pixels: dict[str, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in (F.conv2d, torch.conv2d):
            self._add(output, *args, **(kwargs or {}))
        return output

    def _add(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        """The gradient of a kernel is the sum of what it takes in where every output counts for one."""
        name = self.kernels.get(id(weight))
        if name is None or not is_simple(input, weight, padding, groups):
            return
        shape = torch.Size((1, *weight.shape[1:])) if groups == 1 else weight.shape
        ones = output.new_ones(1, 1, 1, 1).expand(len(output), shape[0], *output.shape[2:])
        total = weight_gradient(input, ones, shape, pair(stride), pair(padding), pair(dilation)).float()
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.pixels[name] = self.pixels.get(name, 0) + output[:, 0].numel()

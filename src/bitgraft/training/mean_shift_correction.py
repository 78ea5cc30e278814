"""Mean inputs of weights, for `Task.correct_mean_shift`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitgraft.task import Task


def corrected_weights(task: Task) -> list[str]:
    """Convolution weights that the task changes and that feed a norm layer whose bias and statistics it owns.

    Not if the norm layer is fed by other weights, or shares its bias: one bias cannot correct several means.
    """
    weights, changed = task.anatomy.weights, {*task.transforms, *task.owned, *task.shared}
    fed = Counter(weight.feeds for weight in weights.values())
    return [
        name
        for name, weight in weights.items()
        if name in changed
        and weight.kind == "conv"
        and weight.feeds is not None
        and fed[weight.feeds] == 1
        and all(f"{weight.feeds}.{part}" in task.owned for part in ("weight", "bias", "running_var"))
        and not task.anatomy.is_tied(f"{weight.feeds}.bias")
    ]


class InputSums(TorchFunctionMode):
    """Within it, sum the input patches of convolutions, by kernel. `kernels` maps the `id` of a kernel to its name."""

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
        name = self.kernels.get(id(weight))
        if name is None or isinstance(padding, str) or groups not in (1, len(weight)):
            return
        summed = input.float().sum(0, keepdim=True)  # first over images: the sum of patches is linear
        patches = F.unfold(summed, weight.shape[2:], dilation, padding, stride)
        total = patches.sum(2).view(-1 if groups > 1 else 1, *weight.shape[1:])
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.pixels[name] = self.pixels.get(name, 0) + output[:, 0].numel()

"""Batch norm over the batch of all processes, on any device.

torch's SyncBatchNorm is for CUDA alone and would have to replace modules; here every call of batch norm in training
mode, from whatever module, takes its mean and variance over all processes while `synchronised` is in force.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class synchronised(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch.no_grad
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def over_processes(count: int) -> AbstractContextManager[Any]:
    """Batch norm takes its statistics over the batch of all processes, if there are several."""
    return synchronised() if count > 1 else nullcontext()


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = [d for d in range(input.dim()) if d != 1]
    wide = input.float()
    count = torch.full((1,), float(input.numel() // input.shape[1]), device=input.device)
    local = torch.cat([wide.sum(dims), wide.square().sum(dims), count])
    sums = all_reduce(local)  # type: ignore[no-untyped-call]
    total = sums[-1]
    mean, square = (sums[:-1] / total).chunk(2)
    var = (square - mean.square()).clamp(min=0)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (total / (total - 1))).to(running_var.dtype), momentum)
    shape = [1, -1] + [1] * (input.dim() - 2)
    scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    normed: Tensor = wide * scale.view(shape) + shift.view(shape)
    return normed.to(input.dtype)

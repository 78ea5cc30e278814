"""Synchronised batch norm, on any device.

`nn.SyncBatchNorm` does not run on a CPU and needs its modules replaced. Within `synchronised`, every batch norm in
training mode computes its mean and variance over all processes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitgraft.errors import TrainingError


class synchronised(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch.no_grad
    """With `count=False` this process takes part with weight 0."""

    def __init__(self, count: bool = True) -> None:
        super().__init__()
        self.weight = float(count)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self.weight, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def over_processes(accelerator: Accelerator, count: bool) -> AbstractContextManager[Any]:
    """`synchronised` if there are several processes."""
    return synchronised(count) if accelerator.num_processes > 1 else nullcontext()


class _AllReduce(torch.autograd.Function):
    """The sum over processes, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004
        torch.distributed.all_reduce(total := tensor.clone())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        torch.distributed.all_reduce(total := grads[0].clone())
        return total


def _batch_norm(
    share: float,
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
    dims, shape = [d for d in range(input.dim()) if d != 1], [1, -1] + [1] * (input.dim() - 2)
    count = torch.full((1,), share * (input.numel() // input.shape[1]), device=input.device)
    with torch.no_grad():  # the mean, up to the rounding of float32
        first = torch.cat([input.float().sum(dims) * share, count])
        torch.distributed.all_reduce(first)
        centre = first[:-1] / first[-1]
    wide = input.float() - centre.view(shape)  # E[x²] - E[x]² is accurate only for a mean near 0
    own = torch.cat([wide.sum(dims) * share, wide.square().sum(dims) * share, count])
    sums: Tensor = _AllReduce.apply(own)
    total = sums[-1]
    mean, square = (sums[:-1] / total).chunk(2)
    var = (square - mean.square()).clamp(min=0)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_((mean + centre).to(running_mean.dtype), momentum)
            running_var.lerp_((var * (total / (total - 1).clamp(min=1))).to(running_var.dtype), momentum)
    scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    normed: Tensor = wide * scale.view(shape) + shift.view(shape)
    return normed.to(input.dtype)


@contextmanager
def explain_single_values() -> Iterator[None]:
    """Turn PyTorch's error about a batch of one value into one that says what to do."""
    try:
        yield
    except ValueError as cause:
        if "more than 1 value per channel" not in str(cause):
            raise
        raise TrainingError(
            "batch norm cannot compute statistics of a single value: train with a batch of at least 2 images, or with "
            "statistics='kept'"
        ) from cause

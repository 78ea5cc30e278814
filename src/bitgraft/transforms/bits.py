"""Binary masks: the hard threshold, its surrogate gradient, bit packing, and a check of the scores."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Surrogate = Literal["identity", "sigmoid"]


def threshold(scores: Tensor, at: float) -> Tensor:
    """M = h(R) = 1[R >= at], as a bool tensor."""
    return scores.detach() >= at


def is_finite(values: Tensor) -> Tensor:
    """`values.isfinite().all()` in one pass without copies: a NaN anywhere becomes the minimum and the maximum."""
    ends = values.aminmax() if values.numel() else (values,)
    return torch.stack(ends).isfinite().all()


def surrogate_grad(grad: Tensor, scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
    """Return dE/dR from dE/dM, with the surrogate's derivative in place of h', which is zero almost everywhere."""
    if surrogate == "identity":
        return grad
    soft = torch.sigmoid((scores - at if at else scores).to(grad.dtype))
    return torch.ops.aten.sigmoid_backward.grad_input(grad, soft, grad_input=soft)  # type: ignore[no-any-return]


def pack(mask: Tensor) -> Tensor:
    """Pack a bool tensor into bytes, row-major: element i is bit i % 8, lowest first, of byte i // 8; padding is 0."""
    flat = mask.reshape(-1)
    if _on_cpu(flat):  # NumPy is much faster
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    padded = F.pad(flat.view(torch.uint8), (0, -flat.numel() % 8))
    return (padded.view(-1, 8) << _bit_indices(mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack`: a bool tensor of this shape."""
    return _bits(packed)[: shape.numel()].view(shape)


def packed_size(count: int) -> int:
    """Return the number of bytes that `count` bits take."""
    return -(-count // 8)


def ones(packed: Tensor) -> int:
    """Return the number of bits that are set."""
    return int(_bits(packed).count_nonzero())


def _bits(packed: Tensor) -> Tensor:
    if _on_cpu(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")).view(torch.bool)
    return (packed.unsqueeze(1) >> _bit_indices(packed.device)).bitwise_and_(1).view(torch.bool).view(-1)


def _bit_indices(device: torch.device) -> Tensor:
    """0 to 7, created on the device: copying a Python list there would synchronise it with the host."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"

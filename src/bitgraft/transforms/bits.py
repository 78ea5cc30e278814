"""Binary masks: the hard threshold, its surrogate slope, and bits packed eight to a byte."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Surrogate = Literal["identity", "sigmoid"]


def threshold(scores: Tensor, at: float) -> Tensor:
    """M = 1[R >= at], as a bool tensor."""
    return scores.detach() >= at


def through_surrogate(grad: Tensor, scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
    """dE/dR from dE/dM: the threshold's zero slope is replaced by the surrogate's."""
    if surrogate == "identity":
        return grad
    soft = torch.sigmoid((scores - at if at else scores).to(grad.dtype))
    return torch.ops.aten.sigmoid_backward.grad_input(grad, soft, grad_input=soft)  # type: ignore[no-any-return]


def pack(mask: Tensor) -> Tensor:
    """Bits of a bool tensor in row-major order, element i in bit i % 8 (lowest first) of byte i // 8; the tail is 0."""
    flat = mask.reshape(-1)
    if _on_cpu(flat):  # NumPy takes a small part of the time
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    padded = F.pad(flat.view(torch.uint8), (0, -flat.numel() % 8))
    return (padded.view(-1, 8) << _places(mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack`, as a bool tensor of `shape`."""
    return _bits(packed)[: shape.numel()].view(shape)


def packed_size(count: int) -> int:
    """Bytes that `count` bits take."""
    return -(-count // 8)


def ones(packed: Tensor) -> int:
    """How many bits are set."""
    return int(_bits(packed).count_nonzero())


def _bits(packed: Tensor) -> Tensor:
    if _on_cpu(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")).view(torch.bool)
    return (packed.unsqueeze(1) >> _places(packed.device)).bitwise_and_(1).view(torch.bool).view(-1)


def _places(device: torch.device) -> Tensor:
    """0 to 7, made on the device: a copy of a Python list would make the host wait for it."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"

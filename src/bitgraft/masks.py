"""Binary masks: the hard threshold, its surrogate slope, and bits packed eight to a byte."""

from typing import Literal

import torch
from torch import Tensor

Surrogate = Literal["identity", "sigmoid"]


def threshold(scores: Tensor, at: float) -> Tensor:
    """M = 1[R >= at]."""
    return scores >= at


def through_surrogate(grad: Tensor, scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
    """dE/dR from dE/dM: the threshold's zero slope is replaced by the surrogate's."""
    if surrogate == "identity":
        return grad
    soft = torch.sigmoid(scores - at)
    return grad * (soft * (1 - soft))


def pack(mask: Tensor) -> Tensor:
    """Bits of a bool tensor in row-major order, element i in bit i % 8 (lowest first) of byte i // 8; the tail is 0."""
    flat = mask.reshape(-1)
    padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
    padded[: flat.numel()] = flat
    return (padded.view(-1, 8).to(torch.uint8) << _shifts(mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack`, as a bool tensor of `shape`."""
    bits = (packed.unsqueeze(1) >> _shifts(packed.device)) & 1  # (bytes, 8)
    return bits.view(-1)[: shape.numel()].view(shape).to(torch.bool)


def packed_size(count: int) -> int:
    """Bytes that `count` bits take."""
    return -(-count // 8)


def ones(packed: Tensor) -> int:
    """How many bits are set."""
    return int(((packed.unsqueeze(1) >> _shifts(packed.device)) & 1).sum())


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

"""What a weight transform is: a small module that holds the parameters of an equation W -> W~."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError


@dataclass(frozen=True)
class Weight:
    """One weight of the backbone, as a transform needs to know it."""

    name: str
    shape: torch.Size
    kind: Literal["conv", "transposed", "linear"]
    groups: int = 1
    feeds: str | None = None
    """The norm layer that takes this layer's output and nothing else, if there is one."""
    scale_free: bool = False
    """That norm undoes any scale of this weight, so k0 stays 1 (the paper, section 3.1)."""
    channels_scale_free: bool = False
    """That norm undoes a scale of each output channel by itself, so k0 stays 1 also with one k per channel."""

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.shape[2:])

    @property
    def outputs(self) -> int:
        return self.shape[1] * self.groups if self.kind == "transposed" else self.shape[0]

    @property
    def grouped_shape(self) -> tuple[int, ...]:
        """The weight's shape with the groups of a transposed convolution split off, so that channels broadcast."""
        if self.kind == "transposed":
            return (self.groups, self.shape[0] // self.groups, *self.shape[1:])
        return tuple(self.shape)

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """How a vector with one entry per output channel broadcasts against `grouped_shape`."""
        if self.kind == "transposed":
            return (self.groups, 1, self.shape[1], *(1 for _ in self.kernel))
        return (self.shape[0], *(1 for _ in self.shape[1:]))

    def filters(self, tensor: Tensor) -> Tensor:
        """The weight as a matrix with one filter (one output channel) per row."""
        if self.kind == "transposed":
            tensor = tensor.reshape(self.grouped_shape).transpose(1, 2)  # (g, out/g, in/g, *kernel)
        return tensor.reshape(self.outputs, -1)

    def from_filters(self, matrix: Tensor) -> Tensor:
        """The inverse of `filters`."""
        if self.kind == "transposed":
            groups, inputs, outputs, *kernel = self.grouped_shape
            matrix = matrix.reshape(groups, outputs, inputs, *kernel).transpose(1, 2)
        return matrix.reshape(self.shape)


class Transform(nn.Module):
    """W -> W~, with a few parameters of its own. Subclasses say what they cost and what goes into a file."""

    tail: nn.Module | None
    """A module to run on the layer's output, which it gives back in the same dtype (series adapters alone have one)."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = None

    def forward(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def role(self, parameter: str) -> str:
        """What a parameter of this name is to an optimiser: "scores", "k", "k1" (k1) or "weights"."""
        return "weights"

    def bits(self, *, statistics: bool = False) -> int:
        """What the transform costs at rest, running statistics of norms that it brings along left out or counted."""
        held = [*self.parameters(), *(b for b in self.buffers() if statistics and b.is_floating_point())]
        return 32 * sum(tensor.numel() for tensor in held)

    def freeze(self) -> None:
        """End of learning: drop what only learning needs. W~ stays the same to the last bit."""
        self.requires_grad_(False)

    def parts(self) -> dict[str, Tensor]:
        """The named tensors that a file holds for this transform."""
        return dict(self.state_dict())

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Become what `parts` came from, frozen."""
        expect({name: tuple(t.shape) for name, t in self.state_dict().items()}, parts)
        self.load_state_dict(dict(parts), assign=True)
        self.freeze()


@runtime_checkable
class Prunable(Protocol):
    """A transform that can give up some of what it owns."""

    def prune(self, share: float) -> None: ...


def expect(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Tensor]) -> None:
    """Refuse parts whose names or shapes are not those expected."""
    if {name: t.shape for name, t in parts.items()} != shapes:
        found = {name: tuple(t.shape) for name, t in parts.items()}
        raise CorruptError(f"a transform's parts should be {dict(shapes)}, the file has {found}; it is not usable")


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: what is added to a half-precision weight is rounded once, at the end."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def strided_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the weight's memory format, since convolutions are faster in the one that the user chose."""
    if tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)

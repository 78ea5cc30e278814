"""The interface of a weight transform W -> W~, and what a transform knows about the weight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError, TaskError

COUNTER = "num_batches_tracked"  # ends the name of a step counter: no output depends on it, and old files lack it
MIN_RMS = 1e-3  # of a tensor that starts at 0, such as a bias
PART_DTYPES = {"mask": torch.uint8, "free": torch.uint8, "levels": torch.int8}  # all other parts are float32


@dataclass(frozen=True)
class Weight:
    """One weight of the backbone: its layout, and the norm layer that it feeds."""

    name: str
    shape: torch.Size
    kind: Literal["conv", "transposed", "linear"]
    groups: int = 1
    feeds: str | None = None
    """The norm layer that alone consumes this layer's output, if any."""
    scale_free: bool = False
    """That norm cancels any scale of this weight, so k0 is fixed to 1 (section 3.1 of the paper)."""
    channels_scale_free: bool = False
    """That norm cancels a separate scale per output channel, so k0 is fixed to 1 with one k per channel as well."""

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.shape[2:])

    @property
    def outputs(self) -> int:
        return self.shape[1] * self.groups if self.kind == "transposed" else self.shape[0]

    @property
    def grouped_shape(self) -> tuple[int, ...]:
        """The shape with the groups of a transposed convolution as a dimension of their own."""
        if self.kind == "transposed":
            return (self.groups, self.shape[0] // self.groups, *self.shape[1:])
        return tuple(self.shape)

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """The shape in which one value per output channel broadcasts against `grouped_shape`."""
        if self.kind == "transposed":
            return (self.groups, 1, self.shape[1], *(1 for _ in self.kernel))
        return (self.shape[0], *(1 for _ in self.shape[1:]))

    def filters(self, tensor: Tensor) -> Tensor:
        """Return the weight as a matrix with one filter (one output channel) per row."""
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
    """W -> W~: holds the parameters of one equation."""

    tail: nn.Module | None
    """A module applied to the layer's output, which keeps its dtype. Only series adapters have one."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = None

    def forward(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def role(self, parameter: str) -> str:
        """Return the optimizer group of a parameter: "scores", "k", "k1" or "weights"."""
        return "weights"

    def changes(self) -> list[nn.Parameter]:
        """Return the parameters that are a change of the weight, in its own units (`Config.relative_rates`)."""
        return []

    def bits(self, *, statistics: bool = False) -> int:
        """Return the storage cost in bits, optionally with the running statistics of the transform's own norms."""
        stored = [*self.parameters(), *(b for b in self.buffers() if statistics and b.is_floating_point())]
        return 32 * sum(tensor.numel() for tensor in stored)

    def freeze(self) -> None:
        """End training and drop whatever only training needs. W~ does not change by a single bit."""
        self.requires_grad_(False)

    def parts(self) -> dict[str, Tensor]:
        """Return the named tensors that a task file stores for this transform: all but a norm's step counter."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith(COUNTER)}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Load `parts` and freeze."""
        check_parts({name: tuple(tensor.shape) for name, tensor in self.parts().items()}, parts)
        self.load_state_dict({**self.state_dict(), **parts}, assign=True)
        self.freeze()


class ScoredTransform(Transform):
    """A transform that trains real-valued scores R and, once frozen, stores them in a few bits per weight.

    `scores` is None in a frozen transform, and in a new one, without parts, that waits for `restore`.
    """

    weight: Weight
    scores: nn.Parameter | None
    hardness = 1.0
    """Annealing, in training mode only: W~ is `hardness` times the quantized W~ plus 1 - `hardness` times W + R."""

    def role(self, parameter: str) -> str:
        return parameter

    def freeze(self) -> None:
        if self.scores is not None:
            self._hold(self.parts())

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        check_parts(self._part_shapes(), parts)
        self._hold(parts)

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        """Become frozen with these parts."""
        raise NotImplementedError

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if state_dict and (self.scores is None) == (f"{prefix}scores" in state_dict):
            here, there, remedy = "frozen", "still training", "add the task again"
            if self.scores is not None:
                here, there, remedy = there, here, "freeze the task first"
            raise TaskError(f"{self.weight.name!r} is {here}, but in this state dict it is {there}: {remedy}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_parts(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Tensor]) -> None:
    """Raise if the parts do not have exactly these names and shapes."""
    found = {name: tuple(t.shape) for name, t in parts.items()}
    if found != shapes:
        raise CorruptError(f"a transform's parts should be {dict(shapes)}, but the file has {found}; it is not usable")


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or wider, so that a half-precision W~ is rounded only once, at the end."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rms(tensor: Tensor) -> float:
    """Return the root mean square, rounded to a power of two so that it does not depend on how a machine adds."""
    size = torch.linalg.vector_norm(widened(tensor.detach())).item() / max(1, tensor.numel()) ** 0.5
    return 2.0 ** round(math.log2(max(size, MIN_RMS)))


def strided_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the weight's memory format, which the user may have chosen for faster convolutions."""
    if tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)

"""Residual adapters (Rebuffi et al.): a 1x1 convolution beside or behind each larger one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitgraft.methods.registry import Method, Options, register_method

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.transforms.base import Weight
    from bitgraft.transforms.residual_adapters import Parallel, Series


def parallel(weight: Weight, tensor: Tensor, *_: Any) -> Parallel | None:
    from bitgraft.transforms.residual_adapters import Parallel

    has_middle = all(size % 2 for size in weight.kernel)
    return Parallel(weight, tensor.device) if _is_spatial(weight) and has_middle else None


def series(weight: Weight, tensor: Tensor, *_: Any) -> Series | None:
    from bitgraft.transforms.residual_adapters import Series

    return Series(weight, tensor.device) if _is_spatial(weight) else None


def _is_spatial(weight: Weight) -> bool:
    return any(size > 1 for size in weight.kernel)


BESIDE = "a 1x1 convolution beside each larger one (residual adapters); own norm layers"
BEHIND = "a residual 1x1 convolution behind each larger one (residual adapters); own norm layers"
JOINT = "series adapters, and the weights that tasks share learn along: tasks in turns, on a new backbone"
EQUATION = "y~ = y + A·BN(y), y = W * x"

register_method(Method("adapters-parallel", BESIDE, "W~ = W + centre(A)", Options(), parallel))
register_method(Method("adapters-series", BEHIND, EQUATION, Options(), series))
register_method(Method("adapters-joint", JOINT, f"{EQUATION}, W learned by all tasks", Options(), series, joint=True))

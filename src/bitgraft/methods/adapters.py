"""Residual adapters (Rebuffi et al.): a 1x1 convolution in parallel or in series with each larger one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitgraft.methods.registry import Method, Options, register_method

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.transforms.base import Transform, Weight


def parallel(weight: Weight, tensor: Tensor, *_: Any) -> Transform | None:
    from bitgraft.transforms.residual_adapters import Parallel

    has_centre = all(size % 2 for size in weight.kernel)
    return Parallel(weight, tensor.device) if _is_spatial(weight) and has_centre else None


def series(weight: Weight, tensor: Tensor, *_: Any) -> Transform | None:
    from bitgraft.transforms.residual_adapters import Series

    return Series(weight, tensor.device) if _is_spatial(weight) else None


def _is_spatial(weight: Weight) -> bool:
    return any(size > 1 for size in weight.kernel)


PARALLEL = "a 1x1 convolution in parallel with each larger one (residual adapters); own norm layers"
SERIES = "a residual 1x1 convolution after each larger one (residual adapters); own norm layers"
JOINT = "series adapters, with the shared weights trained on all tasks in turn; makes a new backbone"
EQUATION = "y~ = y + A·BN(y), y = W * x"

register_method(Method("adapters-parallel", PARALLEL, "W~ = W + centre(A)", Options(), parallel))
register_method(Method("adapters-series", SERIES, EQUATION, Options(), series))
register_method(Method("adapters-joint", JOINT, f"{EQUATION}, W learned by all tasks", Options(), series, joint=True))

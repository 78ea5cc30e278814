"""Deep adaptation networks (Rosenfeld and Tsotsos): linear combinations of each layer's filters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitgraft.methods.registry import Method, Options, register_method

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.transforms.base import Transform, Weight


def recombined(weight: Weight, tensor: Tensor, *_: Any) -> Transform:
    from bitgraft.transforms.recombined import Recombined

    return Recombined(weight, tensor.device)


SUMMARY = "linear combinations of each layer's filters; own norm layers"

register_method(Method("dan", SUMMARY, "W~ = P · W", Options(), recombined))

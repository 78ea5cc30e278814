"""Deep adaptation networks (Rosenfeld and Tsotsos): a task recombines each layer's filters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitgraft.methods.registry import Method, Options, register_method

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.transforms.base import Weight
    from bitgraft.transforms.recombined import Recombined


def recombined(weight: Weight, tensor: Tensor, *_: Any) -> Recombined:
    from bitgraft.transforms.recombined import Recombined

    return Recombined(weight, tensor.device)


register_method(
    Method("dan", "each layer's filters recombined linearly; own norm layers", "W~ = P · W", Options(), recombined)
)

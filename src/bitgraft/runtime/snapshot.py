"""Whether tensors have been exchanged, moved or written to since something was computed from them."""

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """How some tensors were at one moment. It does not keep them alive.

    torch counts the writes to a tensor in `_version`. It does not count writes through `.data` or NumPy, those of fused
    optimizers, and writes to tensors made in inference mode: `probe=True` looks at the first element of each as well.
    """

    def __init__(self, tensors: Collection[Tensor], *, probe: bool = False) -> None:
        self._tensors = [(weakref.ref(t), weakref.ref(t.untyped_storage())) for t in tensors]
        self._versions = _versions(tensors)
        self._first = _first_elements(tensors) if probe else None

    def matches(self, tensors: Collection[Tensor]) -> bool:
        """These are the same tensors, with the same memory and, as far as can be told, the same values."""
        return (
            len(tensors) == len(self._tensors)
            and _versions(tensors) == self._versions
            and all(
                known() is tensor and storage() is tensor.untyped_storage()
                for (known, storage), tensor in zip(self._tensors, tensors, strict=True)
            )
            and (self._first is None or _first_elements(tensors) == self._first)
        )


def _versions(tensors: Collection[Tensor]) -> list[int | None]:
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


@torch.no_grad()
def _first_elements(tensors: Collection[Tensor]) -> list[Any]:
    return [tensor.as_strided((), ()).item() for tensor in tensors if tensor.numel()]

"""Detect tensors that were replaced, moved or written to."""

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """The state of some tensors at one moment. It does not keep them alive.

    torch counts writes to a tensor in `_version`, except writes through `.data` or NumPy, by fused optimizers, and to
    tensors created in inference mode. `probe=True` also compares the first element of each tensor.
    """

    def __init__(self, tensors: Collection[Tensor], *, probe: bool = False) -> None:
        self._tensors = [(weakref.ref(t), weakref.ref(t.untyped_storage())) for t in tensors]
        self._versions = _versions(tensors)
        self._first = _first_elements(tensors) if probe else None

    def matches(self, tensors: Collection[Tensor]) -> bool:
        """Return whether these are the same tensors with the same storage and, as far as we can tell, values."""
        return (
            len(tensors) == len(self._tensors)
            and _versions(tensors) == self._versions
            and all(
                same() is tensor and storage() is tensor.untyped_storage()
                for (same, storage), tensor in zip(self._tensors, tensors, strict=True)
            )
            and (self._first is None or _first_elements(tensors) == self._first)
        )


def _versions(tensors: Collection[Tensor]) -> list[int | None]:
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


@torch.no_grad()
def _first_elements(tensors: Collection[Tensor]) -> list[Any]:
    return [tensor.as_strided((), ()).item() for tensor in tensors if tensor.numel()]

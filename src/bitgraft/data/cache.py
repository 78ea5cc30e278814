"""Decoded images in memory that all of a loader's workers share."""

import os
import shutil
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHARED_MEMORY = "/dev/shm"


class PixelCache:
    """The first images of a data set, as many as the budget holds, each with a flag that says whether it is there.

    Any worker may fill any place at any time: it writes the pixels first and the flag after them, and two that fill the
    same place write the same bytes. Nobody waits for anybody.
    """

    def __init__(self, items: int, shape: tuple[int, int, int], budget: int) -> None:
        rows = min(items, room(budget) // int(np.prod(shape)))
        self.shape, self.budget, self.items = shape, budget, items
        pixels = torch.empty((rows, *shape), dtype=torch.uint8)  # zeros would take a pass over a gigabyte
        self._share(shared(pixels), shared(torch.zeros(rows, dtype=torch.uint8)))

    def _share(self, pixels: Tensor, filled: Tensor) -> None:
        self._tensors = pixels, filled
        self._pixels: NDArray[np.uint8] = pixels.numpy()
        self._filled: NDArray[np.uint8] = filled.numpy()  # numpy reads one flag ten times as fast as torch

    def __contains__(self, index: int) -> bool:
        return index < len(self._filled) and bool(self._filled[index])

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = self._pixels[index]
        return pixels

    def __setitem__(self, index: int, pixels: NDArray[np.uint8]) -> None:
        if index < len(self._filled):
            self._pixels[index] = pixels
            self._filled[index] = 1

    def __getstate__(self) -> dict[str, Any]:
        """A worker being started gets the memory itself; a pickle on its way elsewhere gets none, only the measures."""
        measures = {"items": self.items, "shape": self.shape, "budget": self.budget}
        return measures if get_spawning_popen() is None else measures | {"tensors": self._tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = state.pop("tensors", None)
        if tensors is None:
            self.__init__(**state)  # type: ignore[misc]
        else:
            self.__dict__.update(state)
            self._share(*tensors)


def shared(tensor: Tensor) -> Tensor:
    """The tensor, moved to where forked and spawned workers see it and may write to it."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def room(budget: int) -> int:
    """What may be used: where shared memory is a small file system (64 MB in a container), writing beyond it kills."""
    if os.path.isdir(SHARED_MEMORY):
        return min(budget, shutil.disk_usage(SHARED_MEMORY).free * 8 // 10)
    return budget

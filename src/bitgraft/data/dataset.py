"""The images of one split as tensors, for torch's DataLoader."""

import copy
import os
import shutil
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bitgraft.data.decode import load
from bitgraft.data.images import Images
from bitgraft.data.preprocessing import (
    Augmentation,
    Pixels,
    Preprocessing,
    center_crop,
    normalize,
    random_box,
    resize_box,
    resize_to_frame,
)
from bitgraft.data.seeded import seeded_uniform

CACHE_BYTES = 1 << 30
_NUMBERS = {"none": 1, "random": 3, "random-resized": 1 + 10 * 4}
"""Random numbers per item: one to flip, two for where to crop, four for each try at a random-resized crop."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images through a preprocessing and, in training, an augmentation.

    An item depends on (seed, epoch, index) alone. Images that are resized to one frame before anything random happens
    are decoded once and kept, for all workers and epochs, up to `cache_bytes`.
    """

    def __init__(
        self,
        images: Images,
        preprocessing: Preprocessing,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.images, self.preprocessing, self.seed = images, preprocessing, seed
        self.augmentation = augmentation or Augmentation(flip=False, crop="none")
        self._epoch = _shared(torch.zeros((), dtype=torch.int64))  # so that persistent workers see it change
        shape = (preprocessing.channels, *preprocessing.frame)
        room = 0 if self.augmentation.crop == "random-resized" else cache_room(cache_bytes)  # memory is taken at once
        rows = min(len(images), room // prod(shape))
        self._cache = _shared(torch.empty((rows, *shape), dtype=torch.uint8))
        self._cached = _shared(torch.zeros(rows, dtype=torch.bool))

    @property
    def labels(self) -> tuple[int, ...]:
        return self.images.labels

    def set_epoch(self, epoch: int) -> None:
        """Call before each pass over a loader; its workers see it too."""
        self._epoch.fill_(epoch)

    def without_augmentation(self) -> "ImageDataset":
        """The same images as they are evaluated, from the same cache."""
        if self.augmentation.crop == "random-resized":
            return ImageDataset(self.images, self.preprocessing)
        plain = copy.copy(self)
        plain.augmentation = Augmentation(flip=False, crop="none")
        return plain

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """A batch at once, which torch's loader asks for: random numbers and normalization take one pass."""
        if any(not -len(self) <= index < len(self) for index in indices):
            raise IndexError(f"items {list(indices)} of a data set of {len(self)} images")
        indices = [int(index) % len(self) for index in indices]
        uniform = seeded_uniform(self.seed, int(self._epoch), indices, _NUMBERS[self.augmentation.crop]).tolist()
        pixels = np.stack([self._augmented(*pair) for pair in zip(indices, uniform, strict=True)])  # (B, C, H, W)
        tensors = normalize(torch.from_numpy(pixels), self.preprocessing)
        return [(tensor, self.labels[index]) for tensor, index in zip(tensors, indices, strict=True)]

    def _augmented(self, index: int, uniform: list[float]) -> Pixels:
        """An image as the network sees it in this epoch, not yet normalized."""
        flip, *crop = uniform
        height, width = self.preprocessing.size
        if self.augmentation.crop == "random-resized":
            image = load(self.images.source[index], name=self._name(index), channels=self.preprocessing.channels)
            box = random_box(image.width, image.height, self.augmentation, crop)
            pixels = resize_box(image, (height, width), box, self.preprocessing)
        elif self.augmentation.crop == "random":
            frame = self._frame(index)
            top, left = int(crop[0] * (frame.shape[1] - height + 1)), int(crop[1] * (frame.shape[2] - width + 1))
            pixels = frame[:, top : top + height, left : left + width]
        else:
            pixels = center_crop(self._frame(index), self.preprocessing)
        return pixels[:, :, ::-1] if self.augmentation.flip and flip < 0.5 else pixels

    def _frame(self, index: int) -> Pixels:
        """The resized image, which is the same in every epoch, from the cache if it is there.

        Workers write to the cache without a lock: pixels come before the flag, and two that write the same image write
        the same bytes.
        """
        if index < len(self._cached) and self._cached[index]:
            return self._cache[index].numpy()
        pixels = resize_to_frame(self.images.source[index], self.preprocessing, self._name(index))
        if index < len(self._cached):
            self._cache[index].numpy()[:] = pixels
            self._cached[index] = True
        return pixels

    def _name(self, index: int) -> str:
        return "" if self.images.files is not None else f"image {index} of the data set"


def cache_room(budget: int, folder: str = "/dev/shm") -> int:
    """The budget, or less where shared memory is small (64 MB in a container): writing beyond it kills the process."""
    return min(budget, shutil.disk_usage(folder).free * 8 // 10) if os.path.isdir(folder) else budget


def _shared(tensor: Tensor) -> Tensor:
    """The tensor in memory that forked and spawned workers can write to."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call,no-any-return]

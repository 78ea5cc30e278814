"""The images of one split as tensors, for a DataLoader."""

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
"""Random numbers per item: one for the flip, two for the crop's position, four per attempt at a random-resized crop."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Preprocessed and, for training, augmented images.

    An item depends only on (seed, epoch, index). Unless crops are random-resized, images are decoded once, and a cache
    of up to `cache_bytes` serves all workers and epochs.
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
        self._epoch = _shared(torch.zeros((), dtype=torch.int64))  # visible to persistent workers
        shape = (preprocessing.channels, *preprocessing.frame)
        budget = 0 if self.augmentation.crop == "random-resized" else cache_room(cache_bytes)
        rows = min(len(images), budget // prod(shape))
        self._cache = _shared(torch.empty((rows, *shape), dtype=torch.uint8))
        self._cached = _shared(torch.zeros(rows, dtype=torch.bool))

    @property
    def labels(self) -> tuple[int, ...]:
        return self.images.labels

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the augmentation. Call it before each pass over a loader."""
        self._epoch.fill_(epoch)

    def without_augmentation(self) -> "ImageDataset":
        """Return the same images preprocessed as for evaluation, with the same cache."""
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
        """Return a batch, as DataLoader does: random numbers and normalization are vectorised."""
        if any(not -len(self) <= index < len(self) for index in indices):
            raise IndexError(f"an index of {list(indices)} is out of range for {len(self)} images")
        indices = [int(index) % len(self) for index in indices]
        uniform = seeded_uniform(self.seed, int(self._epoch), indices, _NUMBERS[self.augmentation.crop]).tolist()
        pixels = np.stack([self._augmented(*pair) for pair in zip(indices, uniform, strict=True)])  # (B, C, H, W)
        tensors = normalize(torch.from_numpy(pixels), self.preprocessing)
        return [(tensor, self.labels[index]) for tensor, index in zip(tensors, indices, strict=True)]

    def _augmented(self, index: int, uniform: list[float]) -> Pixels:
        """Return an image as the network sees it in this epoch, before normalization."""
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
        """Return the resized image, from the cache if possible.

        Workers write to the cache without a lock. They write the pixels before the flag, and always the same bytes.
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
    """Limit the cache to the free shared memory (64 MB in a container), since exceeding it kills the process."""
    return min(budget, shutil.disk_usage(folder).free * 8 // 10) if os.path.isdir(folder) else budget


def _shared(tensor: Tensor) -> Tensor:
    """Move a tensor to memory that workers can write to."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call,no-any-return]

"""The images of one split as tensors, for torch's DataLoader."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bitgraft.data.cache import PixelCache, shared
from bitgraft.data.chance import draws
from bitgraft.data.decode import find_bad, load
from bitgraft.data.images import Images
from bitgraft.data.preprocessing import (
    Augmentation,
    Pixels,
    Preprocessing,
    central,
    framed,
    normalise,
    random_box,
    resampled,
)

CACHE_BYTES = 1 << 30
_ROLLS = {"none": 1, "random": 3, "random-resized": 1 + 10 * 4}
"""Random numbers for an item: one to flip, two for where to crop, four for each try at a random-resized crop."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images through a preprocessing, and an augmentation in training.

    What an item looks like depends on (seed, epoch, index) alone. Images that are resized to one frame before anything
    random happens are decoded once and kept, for all workers and epochs, up to `cache_bytes`.
    """

    def __init__(
        self,
        images: Images,
        preprocessing: Preprocessing,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        *,
        cache_bytes: int = CACHE_BYTES,
        skip_bad: bool = False,
    ) -> None:
        self.skipped: list[tuple[Path, str]] = find_bad(images) if skip_bad else []
        self.images = images.without(self.skipped)
        self.preprocessing, self.augmentation, self.seed = preprocessing, augmentation, seed
        self._epoch = shared(torch.zeros((), dtype=torch.int64))  # so that persistent workers see it change
        self._crop = "none" if augmentation is None else augmentation.crop
        self._cache: PixelCache | None = None
        if self._crop != "random-resized":
            frame = (preprocessing.channels, *preprocessing.frame)
            self._cache = PixelCache(len(self.images), frame, cache_bytes)

    @property
    def labels(self) -> tuple[int, ...]:
        return self.images.labels

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Before a loader is iterated over; its workers see it too."""
        self._epoch.fill_(epoch)

    def without_augmentation(self) -> "ImageDataset":
        """The same images as they are evaluated; none is decoded again."""
        if self._cache is None:
            return ImageDataset(self.images, self.preprocessing)
        plain = copy.copy(self)
        plain.augmentation, plain._crop = None, "none"
        return plain

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """A batch at once: torch's loader calls this, and it is what one item is made by, too."""
        places = [self._place(index) for index in indices]
        rolls = draws(self.seed, self.epoch, places, _ROLLS[self._crop])
        size = (self.preprocessing.channels, *self.preprocessing.size)
        batch = np.empty((len(places), *size), dtype=np.uint8)  # (B, C, H, W)
        for row, place in enumerate(places):
            batch[row] = self._look(place, rolls[row])
        tensors = normalise(torch.from_numpy(batch), self.preprocessing)
        return [(tensor, self.images.labels[place]) for tensor, place in zip(tensors.unbind(), places, strict=True)]

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of a data set of {len(self)} images")
        return int(index) % len(self)

    def _look(self, index: int, rolls: NDArray[np.float64]) -> Pixels:
        """What the network sees of an image this time, before it is normalised."""
        if self._crop == "random-resized":
            pixels = self._part(index, rolls[1:])
        else:
            pixels = self._frame(index)
            if self._crop == "random":
                pixels = _window(pixels, self.preprocessing.size, rolls[1:])
            else:
                pixels = central(pixels, self.preprocessing)
        flip = self.augmentation is not None and self.augmentation.flip and rolls[0] < 0.5
        return pixels[:, :, ::-1] if flip else pixels

    def _frame(self, index: int) -> Pixels:
        """The image at the size that is the same every time."""
        assert self._cache is not None
        if index in self._cache:
            return self._cache[index]
        pixels = framed(self.images.source[index], self.preprocessing, self._name(index))
        self._cache[index] = pixels
        return pixels

    def _part(self, index: int, rolls: NDArray[np.float64]) -> Pixels:
        assert self.augmentation is not None
        image = load(self.images.source[index], name=self._name(index), channels=self.preprocessing.channels)
        box = random_box(image.width, image.height, self.augmentation, rolls.tolist())
        return resampled(image, self.preprocessing.size, box, self.preprocessing)

    def _name(self, index: int) -> str:
        return "" if self.images.files is not None else f"image {index} of the data set"


def _window(frame: Pixels, size: tuple[int, int], rolls: NDArray[np.float64]) -> Pixels:
    height, width = size
    top = int(rolls[0] * (frame.shape[1] - height + 1))
    left = int(rolls[1] * (frame.shape[2] - width + 1))
    return frame[:, top : top + height, left : left + width]

"""How an image becomes what a network takes. Evaluation, prediction and serving all go through `evaluation_tensor`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import exp, floor, isfinite, log, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bitgraft.data.decode import Picture, load
from bitgraft.errors import DataError

Pixels = NDArray[np.uint8]
"""(C, H, W)"""

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_IMAGENET = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}


@dataclass(frozen=True)
class Preprocessing:
    """What a task file says of its images: resize the shorter side, crop the centre, (x / 255 - mean) / std."""

    size: tuple[int, int]
    """Height and width of what the network sees."""
    mean: tuple[float, ...] = _IMAGENET[3][0]
    std: tuple[float, ...] = _IMAGENET[3][1]
    interpolation: str = "bilinear"
    resize: int = 0
    """The shorter side before the crop (72 for the decathlon's 64); 0 means no margin: the shorter side of `size`."""
    crop: Literal["center", "squash"] = "center"
    """center keeps the proportions and cuts off what juts out; squash fits the whole image in, out of proportion."""
    channels: int = 3

    def __post_init__(self) -> None:
        if not self.resize:
            object.__setattr__(self, "resize", min(self.size))
        if len(self.size) != 2 or min(self.size) < 1 or self.resize < min(self.size):
            raise DataError(
                f"images of {self.size} cut from {self.resize} pixels: size is height and width, at least 1 each, "
                "and resize at least the smaller of them"
            )
        if self.channels not in _IMAGENET or not len(self.mean) == len(self.std) == self.channels:
            raise DataError(
                f"{self.channels} channels with {len(self.mean)} means and {len(self.std)} deviations: "
                "there must be 1 or 3 channels, with a mean and a deviation for each"
            )
        if not all(map(isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise DataError(f"mean {self.mean} and std {self.std} must be finite, and std above 0")
        if self.interpolation not in INTERPOLATIONS:
            raise DataError(f"interpolation {self.interpolation!r} is none of {', '.join(INTERPOLATIONS)}")
        if self.crop not in ("center", "squash"):
            raise DataError(f"crop {self.crop!r} is neither 'center' nor 'squash'")

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> "Preprocessing":
        """From a task file, or from what a backbone states (size, mean, std, interpolation, crop_pct); what is left out
        is 224 pixels and ImageNet's mean and deviation."""
        known = {field.name for field in fields(cls)} | {"crop_pct"}
        if unknown := sorted(set(stated) - known):
            raise DataError(f"preprocessing says {', '.join(unknown)}, which this bitgraft does not know: update it")
        try:
            return cls(**_arguments(dict(stated)))
        except (TypeError, ValueError, ZeroDivisionError) as problem:
            if isinstance(problem, DataError):
                raise
            raise DataError(f"preprocessing cannot be read from {dict(stated)}: {problem}") from problem

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives the same preprocessing back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def at(self, size: int | tuple[int, int], resize: int | None = None) -> "Preprocessing":
        """The same for images of another size, with the margin in proportion unless told."""
        height, width = (size, size) if isinstance(size, int) else size
        margin = resize or floor(self.resize * min(height, width) / min(self.size))
        return replace(self, size=(height, width), resize=margin)

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width before the crop: `size` with its margin."""
        height, width = (round(side * self.resize / min(self.size)) for side in self.size)
        return height, width


def _arguments(stated: dict[str, Any]) -> dict[str, Any]:
    size = stated.get("size", 224)
    stated["size"] = (int(size), int(size)) if isinstance(size, int) else tuple(map(int, size))
    crop_pct = stated.pop("crop_pct", None)
    if crop_pct is not None and not stated.get("resize"):
        stated["resize"] = max(min(stated["size"]), floor(min(stated["size"]) / crop_pct))
    mean, std = _IMAGENET.get(stated.get("channels", 3), _IMAGENET[3])
    for key, default in (("mean", mean), ("std", std)):
        stated[key] = tuple(map(float, stated.get(key, default)))
    return stated


@dataclass(frozen=True)
class Augmentation:
    """What training may change in an image."""

    flip: bool = True
    """Mirror every other image, left to right."""
    crop: Literal["random", "random-resized", "none"] = "random"
    """random: anywhere in the resized frame; random-resized: a part of any size and shape; none: the centre."""
    scale: tuple[float, float] = (0.08, 1.0)
    """random-resized: the smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """random-resized: the narrowest and widest proportion of width to height."""

    def __post_init__(self) -> None:
        if self.crop not in ("random", "random-resized", "none"):
            raise DataError(f"crop {self.crop!r} is none of 'random', 'random-resized', 'none'")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale {self.scale}: two shares of the image's area, above 0 and at most 1, smaller first")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio {self.ratio}: two proportions above 0, smaller first")


def evaluation_tensor(image: Picture, preprocessing: Preprocessing) -> Tensor:
    """One image as the network takes it, (C, H, W)."""
    pixels = central(framed(image, preprocessing), preprocessing)
    return normalise(torch.from_numpy(pixels.copy()), preprocessing)


def framed(picture: Picture, preprocessing: Preprocessing, name: str = "") -> Pixels:
    """The picture resized, and cut to the frame around its centre."""
    height, width = preprocessing.frame
    image = load(picture, name=name, channels=preprocessing.channels, at_least=2 * max(height, width))
    box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.crop == "center":
        box = _centre_box(image.width, image.height, width, height)
    return resampled(image, (height, width), box, preprocessing)


def _centre_box(wide: int, high: int, width: int, height: int) -> tuple[float, float, float, float]:
    """Where the frame lies in the picture: as if resized first, sides in whole pixels, and cut then."""
    if width * high >= height * wide:
        across, down = width, max(height, width * high // wide)
    else:
        across, down = max(width, height * wide // high), height
    left, top = (across - width) // 2, (down - height) // 2
    x, y = wide / across, high / down
    return left * x, top * y, min((left + width) * x, wide), min((top + height) * y, high)


def resampled(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float], preprocessing: Preprocessing
) -> Pixels:
    """The part of the image inside the box, at this height and width. PIL looks beyond the box at its edges, so this is
    what resizing the whole and cutting would give, at a fraction of the work."""
    part = image.resize((size[1], size[0]), INTERPOLATIONS[preprocessing.interpolation], box=box)
    array = np.asarray(part)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def central(frame: Pixels, preprocessing: Preprocessing) -> Pixels:
    height, width = preprocessing.size
    top, left = (frame.shape[1] - height) // 2, (frame.shape[2] - width) // 2
    return frame[:, top : top + height, left : left + width]


def random_box(
    wide: int, high: int, augmentation: Augmentation, rolls: Sequence[float]
) -> tuple[float, float, float, float]:
    """A part of random area and proportions that fits (ten tries, as torchvision does it), or else the largest in the
    middle."""
    narrow, broad = augmentation.ratio
    for area, shape, x, y in zip(*(iter(rolls),) * 4, strict=False):
        pixels = wide * high * (augmentation.scale[0] + area * (augmentation.scale[1] - augmentation.scale[0]))
        ratio = exp(log(narrow) + shape * (log(broad) - log(narrow)))
        width, height = round(sqrt(pixels * ratio)), round(sqrt(pixels / ratio))
        if 0 < width <= wide and 0 < height <= high:
            left, top = floor(x * (wide - width + 1)), floor(y * (high - height + 1))
            return left, top, left + width, top + height
    width, height = min(wide, max(1, round(high * broad))), min(high, max(1, round(wide / narrow)))
    left, top = (wide - width) // 2, (high - height) // 2
    return left, top, left + width, top + height


def normalise(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (..., C, H, W) to (x / 255 - mean) / std."""
    mean, std = _constants(preprocessing.mean, preprocessing.std)
    return pixels.to(torch.float32).sub_(mean).div_(std)


@lru_cache(maxsize=32)
def _constants(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    def column(values: tuple[float, ...]) -> Tensor:
        return torch.tensor([255 * value for value in values], dtype=torch.float32).view(-1, 1, 1)

    return column(mean), column(std)

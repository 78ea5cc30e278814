"""How an image becomes a network's input. Evaluation, prediction and serving all go through `evaluation_tensor`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the original image."""

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
_IMAGENET = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}


@dataclass(frozen=True)
class Preprocessing:
    """What a task file says about its images: resize the shorter side, crop the centre, (x / 255 - mean) / std."""

    size: tuple[int, int]
    """Height and width of the network's input."""
    mean: tuple[float, ...] = _IMAGENET[3][0]
    std: tuple[float, ...] = _IMAGENET[3][1]
    interpolation: str = "bilinear"
    resize: int = 0
    """The shorter side before the crop (72 for the decathlon's 64); 0 means no margin, the shorter side of `size`."""
    crop: Literal["center", "squash"] = "center"
    """center keeps the aspect ratio and cuts the longer side; squash resizes the whole image to the frame."""
    channels: int = 3

    def __post_init__(self) -> None:
        if not self.resize:
            object.__setattr__(self, "resize", min(self.size))
        if len(self.size) != 2 or min(self.size) < 1 or self.resize < min(self.size):
            raise DataError(
                f"size {self.size} with resize {self.resize}: size is height and width, at least 1 each, and resize "
                "at least the smaller of them"
            )
        if self.channels not in _IMAGENET or not len(self.mean) == len(self.std) == self.channels:
            raise DataError(
                f"{self.channels} channels with {len(self.mean)} means and {len(self.std)} deviations: "
                "there must be 1 or 3 channels, with a mean and a deviation for each"
            )
        if not all(map(isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise DataError(f"mean {self.mean} and std {self.std} must be finite, and std above 0")
        _check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        _check_choice("crop", self.crop, ("center", "squash"))

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> "Preprocessing":
        """From a task file, or from a backbone's configuration (which may give `crop_pct`).

        Defaults are 224 pixels and ImageNet's mean and deviation.
        """
        known = {field.name for field in fields(cls)} | {"crop_pct"}
        if unknown := sorted(set(stated) - known):
            raise DataError(f"preprocessing says {', '.join(unknown)}, which this bitgraft does not know: update it")
        try:
            values = dict(stated)
            size, crop_pct = values.get("size", 224), values.pop("crop_pct", None)
            values["size"] = (int(size), int(size)) if isinstance(size, int) else tuple(map(int, size))
            if crop_pct is not None and not values.get("resize"):
                values["resize"] = max(min(values["size"]), floor(min(values["size"]) / crop_pct))
            defaults = _IMAGENET.get(values.get("channels", 3), _IMAGENET[3])
            for key, default in zip(("mean", "std"), defaults, strict=True):
                values[key] = tuple(map(float, values.get(key, default)))
            return cls(**values)
        except DataError:
            raise
        except (TypeError, ValueError, ZeroDivisionError) as problem:
            raise DataError(f"preprocessing cannot be read from {dict(stated)}: {problem}") from problem

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives the same preprocessing back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def at(self, size: int | tuple[int, int], resize: int | None = None) -> "Preprocessing":
        """The same at another size, with the margin in proportion unless given."""
        height, width = (size, size) if isinstance(size, int) else size
        margin = resize or floor(self.resize * min(height, width) / min(self.size))
        return replace(self, size=(height, width), resize=margin)

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width before the crop: `size` with its margin."""
        height, width = (round(side * self.resize / min(self.size)) for side in self.size)
        return height, width


@dataclass(frozen=True)
class Augmentation:
    """What training may change in an image."""

    flip: bool = True
    """Mirror every other image, left to right."""
    crop: Literal["random", "random-resized", "none"] = "random"
    """random: anywhere in the resized frame; random-resized: a box of random size and shape; none: the centre."""
    scale: tuple[float, float] = (0.08, 1.0)
    """random-resized: the smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """random-resized: the smallest and largest aspect ratio, width / height."""

    def __post_init__(self) -> None:
        _check_choice("crop", self.crop, ("random", "random-resized", "none"))
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale {self.scale}: two shares of the image's area, above 0 and at most 1, smaller first")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio {self.ratio}: two aspect ratios above 0, smaller first")


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{name} {value!r} is not one of {', '.join(known)}")


def evaluation_tensor(image: Picture, preprocessing: Preprocessing) -> Tensor:
    """One image as the network takes it, (C, H, W)."""
    pixels = center_crop(resize_to_frame(image, preprocessing), preprocessing)
    return normalize(torch.from_numpy(pixels.copy()), preprocessing)


def resize_to_frame(picture: Picture, preprocessing: Preprocessing, name: str = "") -> Pixels:
    """The picture resized and, unless squashed, cut to the frame around its centre."""
    height, width = preprocessing.frame
    image = load(picture, name=name, channels=preprocessing.channels, at_least=2 * max(height, width))
    box: Box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.crop == "center":
        box = _center_box(image.width, image.height, width, height)
    return resize_box(image, (height, width), box, preprocessing)


def _center_box(image_width: int, image_height: int, width: int, height: int) -> Box:
    """The frame in the original image: as if that were resized to whole pixels first, and cropped then."""
    if width * image_height >= height * image_width:
        across, down = width, max(height, width * image_height // image_width)
    else:
        across, down = max(width, height * image_width // image_height), height
    left, top = (across - width) // 2, (down - height) // 2
    x, y = image_width / across, image_height / down
    return left * x, top * y, min((left + width) * x, image_width), min((top + height) * y, image_height)


def resize_box(image: Image.Image, size: tuple[int, int], box: Box, preprocessing: Preprocessing) -> Pixels:
    """The part of the image inside the box, at this height and width.

    PIL samples beyond the box's edges, so this equals resizing the whole image and cropping, with far less work.
    """
    method = Image.Resampling[preprocessing.interpolation.upper()]
    array = np.asarray(image.resize((size[1], size[0]), method, box=box))
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def center_crop(frame: Pixels, preprocessing: Preprocessing) -> Pixels:
    height, width = preprocessing.size
    top, left = (frame.shape[1] - height) // 2, (frame.shape[2] - width) // 2
    return frame[:, top : top + height, left : left + width]


def random_box(image_width: int, image_height: int, augmentation: Augmentation, uniform: Sequence[float]) -> Box:
    """A box of random area and aspect ratio, as in torchvision's RandomResizedCrop: the first of ten tries that fits,
    or else the largest in the middle. Each try takes four of the numbers."""
    (smallest, largest), (narrow, wide) = augmentation.scale, augmentation.ratio
    for area, shape, x, y in zip(*(iter(uniform),) * 4, strict=False):
        pixels = image_width * image_height * (smallest + area * (largest - smallest))
        ratio = exp(log(narrow) + shape * (log(wide) - log(narrow)))
        width, height = round(sqrt(pixels * ratio)), round(sqrt(pixels / ratio))
        if 0 < width <= image_width and 0 < height <= image_height:
            left, top = floor(x * (image_width - width + 1)), floor(y * (image_height - height + 1))
            return left, top, left + width, top + height
    width = min(image_width, max(1, round(image_height * wide)))
    height = min(image_height, max(1, round(image_width / narrow)))
    left, top = (image_width - width) // 2, (image_height - height) // 2
    return left, top, left + width, top + height


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (..., C, H, W) to (x / 255 - mean) / std."""
    mean, std = (
        torch.tensor([255 * value for value in values], dtype=torch.float32).view(-1, 1, 1)
        for values in (preprocessing.mean, preprocessing.std)
    )
    return pixels.to(torch.float32).sub_(mean).div_(std)

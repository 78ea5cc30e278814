"""Turn an image into a network's input. Evaluation, prediction and serving all use `evaluation_tensor`."""

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
    """A task's preprocessing: resize the shorter side, crop the centre, then (x / 255 - mean) / std."""

    size: tuple[int, int]
    """Height and width of the network's input."""
    mean: tuple[float, ...] = _IMAGENET[3][0]
    std: tuple[float, ...] = _IMAGENET[3][1]
    interpolation: str = "bilinear"
    resize: int = 0
    """The shorter side before the crop (72 for the decathlon's 64). 0 is the shorter side of `size`: no margin."""
    crop: Literal["center", "squash"] = "center"
    """center keeps the aspect ratio and crops the longer side, squash ignores the aspect ratio."""
    channels: int = 3

    def __post_init__(self) -> None:
        if not self.resize:
            object.__setattr__(self, "resize", min(self.size))
        if len(self.size) != 2 or min(self.size) < 1 or self.resize < min(self.size):
            raise DataError(
                f"size {self.size} with resize {self.resize}: size must be a height and a width of at least 1, and "
                "resize at least the smaller of them"
            )
        if self.channels not in _IMAGENET or not len(self.mean) == len(self.std) == self.channels:
            raise DataError(
                f"{self.channels} channels with {len(self.mean)} means and {len(self.std)} standard deviations: "
                "there must be 1 or 3 channels, each with a mean and a standard deviation"
            )
        if not all(map(isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise DataError(f"mean {self.mean} and std {self.std} must be finite, and std positive")
        _check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        _check_choice("crop", self.crop, ("center", "squash"))

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> "Preprocessing":
        """Read a task file's preprocessing, or a backbone's configuration, which may have `crop_pct`.

        Defaults are 224 pixels and ImageNet's mean and standard deviation.
        """
        known = {field.name for field in fields(cls)} | {"crop_pct"}
        if unknown := sorted(set(stated) - known):
            raise DataError(f"this bitgraft does not know {', '.join(unknown)} in a preprocessing: update it")
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
            raise DataError(f"invalid preprocessing {dict(stated)}: {problem}") from problem

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which `from_dict` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def at(self, size: int | tuple[int, int], resize: int | None = None) -> "Preprocessing":
        """Return this preprocessing at another size. The margin scales with it unless `resize` is given."""
        height, width = (size, size) if isinstance(size, int) else size
        margin = resize or floor(self.resize * min(height, width) / min(self.size))
        return replace(self, size=(height, width), resize=margin)

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width before the crop."""
        height, width = (round(side * self.resize / min(self.size)) for side in self.size)
        return height, width


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images."""

    flip: bool = True
    """Flip horizontally with probability 0.5."""
    crop: Literal["random", "random-resized", "none"] = "random"
    """random: anywhere in the resized frame; random-resized: a box of random size and shape; none: the centre."""
    scale: tuple[float, float] = (0.08, 1.0)
    """random-resized: range of the box's share of the image area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """random-resized: range of the aspect ratio, width / height."""

    def __post_init__(self) -> None:
        _check_choice("crop", self.crop, ("random", "random-resized", "none"))
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale {self.scale} must be two ascending shares of the image area in (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio {self.ratio} must be two ascending, positive aspect ratios")


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{name} {value!r} is not one of {', '.join(known)}")


def evaluation_tensor(image: Picture, preprocessing: Preprocessing) -> Tensor:
    """Return an image as the network's input, (C, H, W)."""
    pixels = center_crop(resize_to_frame(image, preprocessing), preprocessing)
    return normalize(torch.from_numpy(pixels.copy()), preprocessing)


def resize_to_frame(picture: Picture, preprocessing: Preprocessing, name: str = "") -> Pixels:
    """Resize a picture to the frame, cropped around its centre unless squashed."""
    height, width = preprocessing.frame
    image = load(picture, name=name, channels=preprocessing.channels, at_least=2 * max(height, width))
    box: Box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.crop == "center":
        box = _center_box(image.width, image.height, width, height)
    return resize_box(image, (height, width), box, preprocessing)


def _center_box(image_width: int, image_height: int, width: int, height: int) -> Box:
    """Return the frame in original pixels, as if the image were resized to whole pixels first and then cropped."""
    if width * image_height >= height * image_width:
        resized_width, resized_height = width, max(height, width * image_height // image_width)
    else:
        resized_width, resized_height = max(width, height * image_width // image_height), height
    left, top = (resized_width - width) // 2, (resized_height - height) // 2
    x, y = image_width / resized_width, image_height / resized_height
    return left * x, top * y, min((left + width) * x, image_width), min((top + height) * y, image_height)


def resize_box(image: Image.Image, size: tuple[int, int], box: Box, preprocessing: Preprocessing) -> Pixels:
    """Resize the part of the image inside the box to this height and width.

    PIL samples beyond the box's edges, so this equals resizing the whole image and cropping, but is much faster.
    """
    method = Image.Resampling[preprocessing.interpolation.upper()]
    array = np.asarray(image.resize((size[1], size[0]), method, box=box))
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def center_crop(frame: Pixels, preprocessing: Preprocessing) -> Pixels:
    height, width = preprocessing.size
    top, left = (frame.shape[1] - height) // 2, (frame.shape[2] - width) // 2
    return frame[:, top : top + height, left : left + width]


def random_box(image_width: int, image_height: int, augmentation: Augmentation, uniform: Sequence[float]) -> Box:
    """Return a box of random area and aspect ratio, as torchvision's RandomResizedCrop does.

    It is the first attempt that fits, or the largest centred box. An attempt takes four of the random numbers.
    """
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
    """Return (x / 255 - mean) / std of uint8 pixels (..., C, H, W)."""
    mean, std = (
        torch.tensor([255 * value for value in values], dtype=torch.float32).view(-1, 1, 1)
        for values in (preprocessing.mean, preprocessing.std)
    )
    return pixels.to(torch.float32).sub_(mean).div_(std)

"""Decode a file, its bytes, a PIL image or an array to an upright 8-bit image, RGB or grey."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bitgraft.errors import DataError

Picture = Path | str | bytes | Image.Image | np.ndarray[Any, Any] | Tensor
"""A file, a file's bytes, a PIL image, or an array (H, W), (H, W, C) or (C, H, W)."""


class ArrayImages:
    """Images of one size in a uint8 tensor (N, H, W) or (N, H, W, C), shared by loader workers."""

    def __init__(self, images: Tensor | NDArray[Any]) -> None:
        self.pixels = torch.from_numpy(np.require(_to_uint8(_channels_last(images)), np.uint8, ["C", "W"]))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return self.pixels[index].numpy()


def load(picture: Picture, *, name: str = "", channels: int = 3, at_least: int | None = None) -> Image.Image:
    """Decode a picture to RGB, or to grey for one channel. Errors refer to it by `name`.

    With `at_least`, a JPEG may be decoded at a fraction of its size as long as both sides keep that many pixels.
    """
    try:
        with _open(picture) as image:
            _check_size(image)
            if at_least is not None and image.format == "JPEG":
                image.draft(None, (at_least, at_least))
            return _eight_bits(_upright(image)).convert("L" if channels == 1 else "RGB")
    except Exception as problem:  # PIL raises almost anything on damaged files: OSError, SyntaxError, struct.error
        name = name or (str(picture) if isinstance(picture, Path | str) else "the image")
        raise DataError(f"cannot read {name}: {_reason(problem)}") from problem


def _open(picture: Picture) -> Image.Image:
    if isinstance(picture, Path | str):
        return Image.open(picture)
    if isinstance(picture, bytes):
        return Image.open(io.BytesIO(picture))
    if isinstance(picture, Image.Image):
        return picture.copy()  # the caller's image stays open
    return Image.fromarray(ArrayImages(picture[None])[0])


def _check_size(image: Image.Image) -> None:
    """Raise above PIL's limit. PIL itself only warns up to twice the limit."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise DataError(
            f"{image.width} x {image.height} pixels exceed PIL's limit of {limit}, which guards against "
            "decompression bombs; if you trust the file, make the image smaller"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Rotate the image as its EXIF data says. Unreadable EXIF data is ignored."""
    try:
        rotated = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception:
        rotated = False
    return ImageOps.exif_transpose(image) if rotated else image


def _eight_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, some in PIL's 32-bit mode: keep the high byte, as PIL does for colour
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        return Image.fromarray(ArrayImages(np.asarray(image)[None])[0])
    if image.has_transparency_data:  # paste on white: colours under transparent pixels are arbitrary, often black
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image


def _reason(problem: Exception) -> str:
    if isinstance(problem, FileNotFoundError):
        return "there is no such file"
    if isinstance(problem, UnidentifiedImageError):
        return "it is not an image that PIL knows"
    return " ".join(str(problem).split()) or type(problem).__name__


def _channels_last(images: Tensor | NDArray[Any]) -> NDArray[Any]:
    """Convert images to (N, H, W) or (N, H, W, C). Ambiguous shapes are NHWC in numpy and NCHW in torch."""
    if isinstance(images, Tensor):
        array = (images.float() if images.dtype == torch.bfloat16 else images).detach().cpu().numpy()
    else:
        array = np.asarray(images)
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which numpy does not count as a float (kind "f")
        array = array.astype(np.float32)
    if array.dtype == object:
        raise DataError("the images differ in size, so they do not form an array: save them as files or pass a Dataset")
    first, last = (array.ndim == 4 and array.shape[place] in (1, 3, 4) for place in (1, -1))
    if first and (isinstance(images, Tensor) or not last):
        array = array.transpose(0, 2, 3, 1)
    elif not last and array.ndim != 3:
        raise DataError(
            "an array of images must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels, "
            f"not {array.shape}"
        )
    return array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array


def _to_uint8(images: NDArray[Any]) -> NDArray[Any]:
    """Convert to 0..255: the high byte of uint16, floats from 0 to 1, and True as white."""
    if images.dtype.kind == "f":
        low, high = images.min(initial=0), images.max(initial=0)
        if not (low >= 0 and high <= 1):
            raise DataError(
                f"floating-point images must be between 0 and 1, but these range from {low:.4g} to {high:.4g}: "
                "scale them, convert them to uint8, or pass normalized images to fit as a Dataset"
            )
        return (images * 255).round()
    kind = images.dtype.str[1:]  # without the byte order
    if kind not in ("u1", "u2", "b1"):
        raise DataError(f"images must be uint8, uint16, bool or floats from 0 to 1, not {images.dtype}: convert them")
    return images >> 8 if kind == "u2" else images * np.uint8(255) if kind == "b1" else images

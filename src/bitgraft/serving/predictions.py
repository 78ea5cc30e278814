"""Validate and decode the images that clients send."""

import io
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import DataError
from bitgraft.serving.http_error import HttpError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # decoded by PIL itself; EPS, for one, starts Ghostscript


def decode_all(images: Sequence[bytes], preprocessings: Sequence[Preprocessing], max_pixels: int) -> list[list[Tensor]]:
    """Return one tensor per image and preprocessing."""
    names = ["the image"] if len(images) == 1 else [f"image {i + 1}" for i in range(len(images))]
    return [decode(data, preprocessings, max_pixels, name) for data, name in zip(images, names, strict=True)]


def decode(data: bytes, preprocessings: Sequence[Preprocessing], max_pixels: int, name: str) -> list[Tensor]:
    """Return one tensor per preprocessing. The image's header is checked before anything is decoded."""
    _check_header(data, max_pixels, name)
    try:
        tensors = {one: evaluation_tensor(data, one) for one in dict.fromkeys(preprocessings)}
    except DataError as problem:
        reason = str(problem).removeprefix("cannot read the image: ")
        raise HttpError(422, f"{name} cannot be decoded: {reason}") from problem
    return [tensors[one] for one in preprocessings]


def check_tensor(images: Tensor, preprocessing: Preprocessing) -> None:
    """Refuse a tensor that cannot be batched with the images of other requests."""
    shape = (preprocessing.channels, *preprocessing.size)
    if images.shape[1:] != shape or not len(images):
        expected = ", ".join(map(str, ("n", *shape)))
        raise HttpError(422, f"the tensor has shape {list(images.shape)}: this task takes [{expected}]")
    if not bool(images.isfinite().all()):
        raise HttpError(422, "the tensor has NaN or infinite values: check its preprocessing")


def _check_header(data: bytes, max_pixels: int, name: str) -> None:
    """Refuse data that is not an image, or would take too much memory to decode."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as problem:
        raise HttpError(413, f"{name} has more than {max_pixels} pixels: make it smaller") from problem
    except UnidentifiedImageError as problem:
        raise HttpError(415, f"{name} is not an image in a supported format: send {', '.join(FORMATS)}") from problem
    except Exception as problem:  # on damaged files PIL raises almost anything
        raise HttpError(422, f"{name} is damaged: its header cannot be read") from problem
    if width * height > max_pixels:
        raise HttpError(413, f"{name} has {width} x {height} pixels, more than {max_pixels}: make it smaller")

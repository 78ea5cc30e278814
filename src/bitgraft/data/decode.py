"""From a file, a PIL image or an array to an upright 8-bit image in colour or grey, the one way there is."""

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bitgraft.data.images import Images
from bitgraft.data.stacks import Stack
from bitgraft.errors import DataError

Picture = Path | str | bytes | Image.Image | np.ndarray[Any, Any] | Tensor
"""A file, a file's bytes, an image that PIL has opened, or an array (H, W), (H, W, C) or (C, H, W)."""


def load(picture: Picture, *, name: str = "", channels: int = 3, at_least: int | None = None) -> Image.Image:
    """The picture as RGB (or grey for one channel). `at_least` lets a JPEG be decoded at a fraction of its size, as
    long as both sides keep so many pixels."""
    name = name or _name(picture)
    try:
        with _opened(picture) as image:
            _check_size(image)
            if at_least is not None and image.format == "JPEG":
                image.draft(None, (at_least, at_least))
            return _plain(_upright(image), "L" if channels == 1 else "RGB")
    except DataError as problem:
        raise DataError(f"cannot read {name}: {problem}") from problem
    except FileNotFoundError as problem:
        raise DataError(f"cannot read {name}: there is no such file") from problem
    except Exception as problem:  # on damaged files PIL raises almost anything: OSError, SyntaxError, struct.error, ...
        raise DataError(f"cannot read {name}: {_reason(problem)}") from problem


def find_bad(
    images: Images, *, workers: int | None = None, progress: Callable[[int], None] | None = None
) -> list[tuple[Path, str]]:
    """The files that cannot be decoded, each with the reason. Each is decoded to its end, in a pool of threads."""
    files = images.files or ()
    bad: list[tuple[Path, str]] = []
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        for done, (path, reason) in enumerate(zip(files, pool.map(_fault, files), strict=True), start=1):
            if reason:
                bad.append((path, reason))
            if progress is not None:
                progress(done)
    return bad


def _fault(path: Path) -> str:
    try:
        load(path)
    except DataError as problem:
        return str(problem).removeprefix(f"cannot read {_name(path)}: ")
    return ""


def _opened(picture: Picture) -> Image.Image:
    if isinstance(picture, Path | str):
        return Image.open(picture)
    if isinstance(picture, bytes):
        return Image.open(io.BytesIO(picture))
    if isinstance(picture, Image.Image):
        return picture.copy()  # the caller's stays open
    array = Stack(picture[None])[0]
    return Image.fromarray(array)


def _check_size(image: Image.Image) -> None:
    """PIL only warns between its limit and twice that; a bomb is a bomb."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise DataError(
            f"{image.width} x {image.height} pixels are more than PIL's limit of {limit}, which guards against "
            "decompression bombs; if the file is yours, make it smaller"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turned as the camera was held; EXIF that cannot be read is no reason to refuse the pixels."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception:
        turned = False
    return ImageOps.exif_transpose(image) if turned else image


def _plain(image: Image.Image, mode: str) -> Image.Image:
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I"):
        image = _high_byte(image)
    elif image.mode == "F":
        image = Image.fromarray(Stack(np.asarray(image)[None])[0])
    elif image.has_transparency_data:
        image = _on_white(image)
    return image.convert(mode)  # a copy in any case, so that the file can be closed


def _high_byte(image: Image.Image) -> Image.Image:
    """16 bits to 8 as PIL does it for colour; grey ones it would clip. Its 32-bit mode holds 16-bit files too."""
    deep = np.asarray(image).astype(np.int64)
    return Image.fromarray((deep.clip(0, 65535) >> 8).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """What shows through is paper: the colours hidden under transparent pixels are arbitrary, often black."""
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)


def _name(picture: Picture) -> str:
    return str(picture) if isinstance(picture, Path | str) else "the image"


def _reason(problem: Exception) -> str:
    if isinstance(problem, UnidentifiedImageError):
        return "it is no image that PIL knows"
    return " ".join(str(problem).split()) or type(problem).__name__

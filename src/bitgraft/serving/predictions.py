"""A client's image: checked, then decoded; `bitgraft.workflows.prediction` has the rest of the way to an answer."""

import io
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import DataError
from bitgraft.serving.refusals import Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # PIL decodes these itself; EPS, for one, runs another program


def decode(data: bytes, wanted: Sequence[Preprocessing], max_pixels: int, name: str = "the image") -> list[Tensor]:
    """A client's image as each preprocessing makes it. Its header is checked before anything is decoded."""
    _check_header(data, max_pixels, name)
    try:
        made = {preprocessing: evaluation_tensor(data, preprocessing) for preprocessing in dict.fromkeys(wanted)}
    except DataError as problem:
        reason = str(problem).removeprefix("cannot read the image: ")
        raise Refusal(422, f"{name} cannot be decoded: {reason}") from problem
    return [made[preprocessing] for preprocessing in wanted]


def check_tensor(images: Tensor, wanted: Preprocessing) -> None:
    """Refuse what cannot run in one batch with other requests' images."""
    shape = (wanted.channels, *wanted.size)
    if images.shape[1:] != shape or not len(images):
        needed = ", ".join(map(str, ("n", *shape)))
        raise Refusal(422, f"the tensor has shape {list(images.shape)}: this task takes [{needed}]")
    if not bool(images.isfinite().all()):
        raise Refusal(422, "the tensor holds numbers that are not finite: check its preprocessing")


def _check_header(data: bytes, max_pixels: int, name: str) -> None:
    """Refuse what is not an image, or would take too much memory to decode."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as problem:
        raise Refusal(413, f"{name} has more than {max_pixels} pixels: make it smaller") from problem
    except UnidentifiedImageError as problem:
        raise Refusal(415, f"{name} is not an image that can be read: send one of {', '.join(FORMATS)}") from problem
    except Exception as problem:  # on damaged files PIL raises almost anything
        raise Refusal(422, f"{name} is damaged: its header cannot be read") from problem
    if width * height > max_pixels:
        raise Refusal(413, f"{name} has {width} x {height} pixels, more than {max_pixels}: make it smaller")

"""From a client's bytes to a tensor. What can be told from an image's header is checked before it is decoded."""

import io

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import DataError
from bitgraft.serving.refusals import Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # none of which PIL hands to another program, as it does EPS


def check_header(data: bytes, max_pixels: int, name: str) -> None:
    """Refuse what is no image, or would take too much memory to decode."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as problem:
        raise Refusal(413, f"{name} has more than {max_pixels} pixels: make it smaller") from problem
    except UnidentifiedImageError as problem:
        known = ", ".join(FORMATS)
        raise Refusal(415, f"{name} is no image that can be read here: send one of {known}") from problem
    except Exception as problem:  # on damaged files PIL raises almost anything
        raise Refusal(422, f"{name} is damaged: not even its header can be read") from problem
    if width * height > max_pixels:
        raise Refusal(413, f"{name} has {width} x {height} pixels, more than {max_pixels}: make it smaller")


def tensors(data: bytes, wanted: list[Preprocessing], max_pixels: int, name: str) -> list[Tensor]:
    """The image as each preprocessing makes it, each of them once."""
    check_header(data, max_pixels, name)
    made: dict[Preprocessing, Tensor] = {}
    try:
        for preprocessing in wanted:
            if preprocessing not in made:
                made[preprocessing] = evaluation_tensor(data, preprocessing)
    except DataError as problem:
        reason = str(problem).removeprefix("cannot read the image: ")
        raise Refusal(422, f"{name} cannot be decoded: {reason}") from problem
    return [made[preprocessing] for preprocessing in wanted]

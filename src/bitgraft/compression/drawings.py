"""Drawings to distil on when there are no images: shapes and strokes over coloured noise, made from a seed.

They look like nothing in particular, but edges, textures and flat areas reach every layer. That is enough for a task to
learn how the fine-tuned copy answers.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torch.utils.data import Dataset

from bitgraft.data.preprocessing import Preprocessing, normalize

COUNT = 512  # an epoch; each has new drawings

Rng = np.random.Generator
Pixels = NDArray[np.float64]
"""(H, W, 3), from 0 to 255 after clipping."""


class Drawings(Dataset[tuple[Tensor, int]]):
    """Drawings as a network's input. An item depends only on (seed, epoch, index)."""

    def __init__(self, preprocessing: Preprocessing, seed: int = 0) -> None:
        self.preprocessing, self.seed, self._epoch = preprocessing, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng((self.seed, self._epoch, index))
        image = draw(rng, *self.preprocessing.size)
        if self.preprocessing.channels == 1:
            image = image.convert("L")
        pixels = torch.from_numpy(np.array(image)).view(*self.preprocessing.size, -1)
        return normalize(pixels.permute(2, 0, 1), self.preprocessing).contiguous(), 0


def draw(rng: Rng, height: int, width: int) -> Image.Image:
    """Return noise alone, shapes over noise, or strokes on a plain ground, which may be white or black."""
    noise = rng.uniform(40, 215, 3) + rng.uniform(5, 60) * coloured_noise(rng, height, width, rng.uniform(0.7, 2))
    kind = rng.choice(["noise", "shapes", "shapes", "plain"])
    if kind == "noise":
        return _image(noise)
    ground = np.broadcast_to(_colour(rng), noise.shape) if kind == "plain" else noise
    image = _image(ground)
    for _ in range(rng.integers(1, 8) if kind == "plain" else rng.integers(3, 40)):
        _add_shape(rng, image)
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.2)))
    if rng.random() < 0.5:
        grain = rng.uniform(2, 20) * coloured_noise(rng, height, width, rng.uniform(0, 1))
        image = _image(np.asarray(image) + grain)
    return image


def coloured_noise(rng: Rng, height: int, width: int, power: float) -> Pixels:
    """Return noise of mean 0 and variance 1 whose amplitude falls with frequency by `power`, as in photographs."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1 / max(height, width)
    phases = rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))
    channels = np.fft.irfft2(phases / frequency**power, s=(height, width))  # (3, H, W)
    mixed = np.einsum("cd,dhw->hwc", 1 + 0.4 * rng.normal(size=(3, 3)), channels)  # channels correlate
    mixed -= mixed.mean((0, 1))
    normalized: Pixels = mixed / (mixed.std() + 1e-6)
    return normalized


def _add_shape(rng: Rng, image: Image.Image) -> None:
    """Draw an ellipse, a polygon or a stroke of random colour, size and place."""
    pen, colour = ImageDraw.Draw(image), tuple(int(value) for value in _colour(rng))
    sides = np.array(image.size)
    radius = 2 + 0.5 * sides.min() * rng.power(0.5)  # mostly small
    centre, kind = rng.uniform(0, sides), rng.choice(["ellipse", "polygon", "stroke", "stroke"])
    if kind == "ellipse":
        reach = radius * np.array([1, rng.uniform(0.3, 1)])
        pen.ellipse([*(centre - reach), *(centre + reach)], fill=colour if rng.random() < 0.6 else None, outline=colour)
    elif kind == "polygon":
        corners = rng.uniform(centre - radius, centre + radius, (rng.integers(3, 7), 2))
        pen.polygon([tuple(corner) for corner in corners], fill=colour)
    else:
        points = rng.uniform(0, sides, (rng.integers(2, 6), 2))
        thickness = max(1, round(sides.min() * rng.uniform(0.015, 0.09)))
        pen.line([tuple(point) for point in points], fill=colour, width=thickness, joint="curve")


def _colour(rng: Rng) -> Pixels:
    """Return a random colour; nearly a third are white or black, as in writing."""
    return np.full(3, 255.0 * rng.integers(2)) if rng.random() < 0.3 else rng.uniform(0, 255, 3)


def _image(pixels: Pixels) -> Image.Image:
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

"""Generated images for calibration without data.

Dead leaves are opaque shapes of random size, place and colour that cover each other. Their statistics are close to
those of photographs (Baradad et al., "Learning to See by Looking at Noise", 2021).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from bitgraft.data.preprocessing import Preprocessing

IMAGES = 1024
SHAPES = (5, 200)  # fewest and most per image
RADII = (0.02, 0.5)  # of the image's shorter side; large shapes are rare: p(r) ~ 1 / r^3
CORNERS = (4, 24)  # rectangles, and as good as ellipses


class DeadLeaves(Dataset[tuple[Tensor, int]]):
    """Images as a network takes them; the same ones every time."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        made = self.preprocessing
        image = draw(made.size, np.random.default_rng(index)).convert("RGB" if made.channels == 3 else "L")
        pixels = torch.from_numpy(np.array(image)).view(*made.size, made.channels).movedim(2, 0) / 255
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (made.mean, made.std))
        return (pixels - mean) / std, 0


def draw(size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Draw one image of this height and width."""
    height, width = size
    image = Image.new("RGB", (width, height), tuple(rng.integers(0, 256, 3)))
    canvas, count = ImageDraw.Draw(image), int(rng.integers(*SHAPES))
    shapes, colours = outlines(size, count, rng), rng.integers(0, 256, (count, 3))
    for outline, colour in zip(shapes, colours.tolist(), strict=True):
        canvas.polygon([tuple(point) for point in outline.tolist()], fill=tuple(colour))
    return image


def outlines(size: tuple[int, int], count: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
    """Return the corners of so many rectangles and ellipses, (corners, 2) each as (x, y)."""
    smallest, largest = (share * min(size) for share in RADII)
    u = rng.random((count, 1))
    radius = ((1 - u) / smallest**2 + u / largest**2) ** -0.5
    aspect, turn, centre = (
        np.exp(0.7 * rng.normal(size=(count, 1))),
        np.pi * rng.random((count, 1)),
        rng.random((count, 2)),
    )
    corners = rng.choice(CORNERS, count, p=(2 / 3, 1 / 3))
    found = []
    for i, number in enumerate(corners):
        angles = 2 * np.pi * (np.arange(number) + 0.5) / number
        across, down = radius[i] * aspect[i] * np.cos(angles), radius[i] / aspect[i] * np.sin(angles)
        x = across * np.cos(turn[i]) - down * np.sin(turn[i]) + centre[i, 0] * size[1]
        y = across * np.sin(turn[i]) + down * np.cos(turn[i]) + centre[i, 1] * size[0]
        found.append(np.stack([x, y], 1))
    return found

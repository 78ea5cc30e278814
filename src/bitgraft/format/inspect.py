"""Statistics of a task file: density and k per layer, bytes by kind. No backbone is needed."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitgraft.backbone.files import read_whole
from bitgraft.format.archive import Archive, from_bytes
from bitgraft.format.summary import Summary, summarize
from bitgraft.transforms.bits import ones


@dataclass(frozen=True)
class Spread:
    """One k of a layer; low and high differ if there is one per output channel."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Layer:
    """One transformed weight."""

    name: str
    shape: tuple[int, ...]
    weights: int
    """The number of masked weights or levels; 0 for other methods and for the vectors of norm layers."""
    ones: int
    """The number of set bits, or of nonzero levels."""
    k: tuple[Spread, ...]
    """k0..k3; empty for other methods."""
    values: int
    """The number of other stored values: of an adapter, of P, or a PackNet task's own weights."""
    bytes: int

    @property
    def density(self) -> float | None:
        return self.ones / self.weights if self.weights else None

    def plain(self) -> dict[str, Any]:
        """Return the layer as JSON, with None for NaN and infinity."""
        about = asdict(self)
        for i, spread in enumerate(about.pop("k")):
            about[f"k{i}"] = {name: value if math.isfinite(value) else None for name, value in spread.items()}
        return {**about, "shape": list(self.shape), "density": self.density}


@dataclass(frozen=True)
class Inspection(Summary):
    """A task file with statistics of its layers, in the order of the forward pass."""

    layers: tuple[Layer, ...]

    @property
    def density(self) -> float | None:
        return sum(layer.ones for layer in self.layers) / self.weights if self.weights else None

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "density": self.density, "layers": [layer.plain() for layer in self.layers]}


def inspect_file(path: str | Path) -> Inspection:
    """Read, check and inspect a task file."""
    data = read_whole(path)
    return inspect_archive(from_bytes(data, str(path)), data)


def inspect_archive(archive: Archive, data: memoryview) -> Inspection:
    """Inspect an archive that was read from these bytes."""
    parts = archive.parts()
    layers = tuple(_layer(name, shape, parts.get(name, {})) for name, shape in archive.shapes.items())
    return Inspection(**vars(summarize(data, archive.metadata.name)), layers=layers)


def _layer(name: str, shape: tuple[int, ...], parts: dict[str, Tensor]) -> Layer:
    mask, k, levels = parts.get("mask"), parts.get("k"), parts.get("levels")
    covered = mask is not None or (levels is not None and len(shape) > 1)
    changed = ones(mask) if mask is not None else int(levels.count_nonzero()) if levels is not None else 0
    values = [tensor.numel() for part, tensor in parts.items() if part not in ("mask", "free", "k", "levels", "step")]
    return Layer(
        name=name,
        shape=shape,
        weights=math.prod(shape) if covered else 0,
        ones=changed if covered else 0,
        k=() if k is None else tuple(Spread(row.mean().item(), row.min().item(), row.max().item()) for row in k),
        values=sum(values),
        bytes=sum(tensor.nbytes for tensor in parts.values()),
    )

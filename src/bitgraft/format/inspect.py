"""Statistics of a task file: density and k per layer, bytes by kind. No backbone is needed."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitgraft.format import compact
from bitgraft.format.archive import Archive, read_archive
from bitgraft.format.summary import Summary, by_kind
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
    return inspect_archive(read_archive(path), Path(path).stat().st_size)


def inspect_archive(archive: Archive, size: int) -> Inspection:
    """Inspect an archive whose file takes `size` bytes."""
    parts = archive.parts()
    layers = tuple(_layer(name, shape, parts.get(name, {})) for name, shape in archive.shapes.items())
    dimensions = {key: tensor.dim() for key, tensor in archive.tensors.items()}
    sizes, about = archive.sizes or _sizes(archive), (archive.metadata, archive.backbone, archive.head_layer)
    taken = by_kind(sizes, size, dimensions, archive.metadata.head, archive.head_layer)
    return Inspection(*about, archive.metrics, taken, sum(layer.weights for layer in layers), layers)


def _sizes(archive: Archive) -> dict[str, int]:
    """Return the bytes that each key would take in a file."""
    tensors = archive.tensors if archive.format < 2 else compact.pack(archive.tensors, archive.shapes)[0]
    described = archive.description.tensors() if archive.description is not None else {}
    return {key: tensor.nbytes for key, tensor in {**tensors, **described}.items()}


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

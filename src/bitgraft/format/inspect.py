"""What is in a task file, in numbers: density and k per layer, bytes by kind. No backbone is needed.

Layers are listed as the file states them: in the order in which data reaches them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitgraft.format import compact
from bitgraft.format.archive import CODED, HEAD, Archive, read_archive
from bitgraft.transforms.bits import ones

KINDS = ("masks", "k", "weights", "norms", "statistics", "head", "header")
PACKED = {compact.MASKS: "masks", compact.CODES: "k", compact.GRIDS: "k", compact.NORMS: "norms"}
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Spread:
    """One k of a layer; low and high differ where each output channel has its own."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Layer:
    """What a task does to one weight."""

    name: str
    shape: tuple[int, ...]
    weights: int
    """How many a mask covers; 0 without a mask."""
    ones: int
    """How many bits of the mask are set."""
    k: tuple[Spread, ...]
    """k0..k3; empty for other methods."""
    values: int
    """Numbers stored besides: an adapter's, P's, a PackNet task's own weights."""
    bytes: int

    @property
    def density(self) -> float | None:
        """The share of ones."""
        return self.ones / self.weights if self.weights else None

    def plain(self) -> dict[str, Any]:
        """As JSON holds it, which has no NaN."""
        about = asdict(self)
        for i, spread in enumerate(about.pop("k")):
            about[f"k{i}"] = {name: value if math.isfinite(value) else None for name, value in spread.items()}
        return {**about, "shape": list(self.shape), "density": self.density}


@dataclass(frozen=True)
class Inspection:
    """A task file, read."""

    archive: Archive
    layers: tuple[Layer, ...]
    bytes: dict[str, int]
    """By kind: masks, k, other weights, norm layers, their running statistics, the head, the file's header."""

    @property
    def size(self) -> int:
        return sum(self.bytes.values())

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers)

    @property
    def density(self) -> float | None:
        return sum(layer.ones for layer in self.layers) / self.weights if self.weights else None

    def bits_per(self, weights: int) -> float:
        """All that the file takes, head apart, for each of so many weights: what every list of tasks shows."""
        return 8 * (self.size - self.bytes["head"]) / weights

    @property
    def bits_per_weight(self) -> float | None:
        """For each weight under a mask."""
        return self.bits_per(self.weights) if self.weights else None

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        about = asdict(self.archive.metadata)
        about["leans_on"] = list(about.pop("depends_on"))
        about["classes"] = None if about["classes"] is None else list(about["classes"])
        return {
            **about,
            "head_layer": self.archive.head_layer,
            "metrics": dict(self.archive.metrics),
            "backbone": self.archive.backbone,
            "size": self.size,
            "bytes": dict(self.bytes),
            "weights": self.weights,
            "density": self.density,
            "bits_per_weight": self.bits_per_weight,
            "layers": [layer.plain() for layer in self.layers],
        }


def inspect_file(path: str | Path) -> Inspection:
    """Read and check a task file, and count what is in it."""
    return inspect_archive(read_archive(path), Path(path).stat().st_size)


def inspect_archive(archive: Archive, size: int) -> Inspection:
    """Count what is in an archive that takes `size` bytes as a file."""
    parts = archive.parts()
    layers = [_layer(name, shape, parts.get(name, {})) for name, shape in archive.shapes.items()]
    taken = dict.fromkeys(KINDS, 0)
    for key, count in (archive.sizes or _sizes(archive)).items():
        taken[_kind(key, archive)] += count
    taken["header"] = size - sum(taken.values())
    return Inspection(archive, tuple(layers), taken)


def _sizes(archive: Archive) -> dict[str, int]:
    """What each key would take in a file."""
    tensors = archive.tensors if archive.format < 2 else compact.pack(archive.tensors, archive.shapes)[0]
    return {key: tensor.nbytes for key, tensor in tensors.items()}


def accuracy(metrics: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """On test images where there were some, else on validation at the epoch that was kept."""
    kept = "best" if metrics.get("kept") == "best" else "last"
    for split, key, name in (("test", "test", "accuracy"), ("val", kept, "val_accuracy")):
        held = metrics.get(key)
        value = held.get(name) if isinstance(held, dict) else None
        if isinstance(value, int | float):
            return split, float(value)
    return None, None


def _layer(name: str, shape: tuple[int, ...], parts: dict[str, Tensor]) -> Layer:
    mask, k = parts.get("mask"), parts.get("k")
    values = [tensor.numel() for part, tensor in parts.items() if part not in ("mask", "free", "k")]
    return Layer(
        name=name,
        shape=shape,
        weights=0 if mask is None else math.prod(shape),
        ones=0 if mask is None else ones(mask),
        k=() if k is None else tuple(Spread(row.mean().item(), row.min().item(), row.max().item()) for row in k),
        values=sum(values),
        bytes=sum(tensor.nbytes for tensor in parts.values()),
    )


def _kind(key: str, archive: Archive) -> str:
    if key in PACKED:
        return PACKED[key]
    name, colon, part = key.partition(":")
    layer, _, last = name.rpartition(".")
    layers = archive.head_layer if isinstance(archive.head_layer, tuple) else (archive.head_layer,)
    replaced = archive.metadata.head == "classes" and key.startswith(tuple(f"{layer}." for layer in layers))
    if key.startswith(HEAD) or replaced:
        return "head"
    if last in STATISTICS or part.endswith(STATISTICS):
        return "statistics"
    if colon:
        return {"mask": "masks", "free": "masks", "k": "k", "borrowed": "k"}.get(part.removesuffix(CODED), "weights")
    return "norms" if _in_norm(layer, last, archive) else "weights"


def _in_norm(layer: str, last: str, archive: Archive) -> bool:
    """A file does not say what a layer is; a norm's tensors are vectors, and so is its weight if it has one."""
    weight = archive.tensors.get(f"{layer}.weight")
    return archive.tensors[f"{layer}.{last}" if layer else last].dim() <= 1 and weight is not None and weight.dim() <= 1

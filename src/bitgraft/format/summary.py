"""What a task file says of itself, from its header alone, so that lists of tasks need no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import read_whole
from bitgraft.format.header import CODED, CODES, DESCRIPTION, GRIDS, HEAD, LEVELS, MASKS, NORMS, STEPS, read_header
from bitgraft.format.metadata import HeadKind, Metadata, read_metadata, read_shapes

KINDS = ("masks", "levels", "k", "weights", "norms", "statistics", "head", "description", "header")
PACKED = {MASKS: "masks", CODES: "k", GRIDS: "k", NORMS: "norms", LEVELS: "levels", STEPS: "levels"}
STATISTICS = ("running_mean", "running_var")
HeadLayer = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Summary:
    """A task file, without what is in its masks and k."""

    metadata: Metadata
    backbone: str
    """The fingerprint of the backbone that the task belongs to."""
    head_layer: HeadLayer
    metrics: Mapping[str, Any]
    bytes: dict[str, int]
    """By kind: masks, levels, k, other weights, norm layers, running statistics, head, description, header."""
    weights: int
    """How many masks or levels cover."""

    @property
    def size(self) -> int:
        return sum(self.bytes.values())

    def bits_per(self, weights: int) -> float:
        """All that the file takes, head and description apart, for each of so many weights: what every list shows."""
        return 8 * (self.size - self.bytes["head"] - self.bytes["description"]) / weights

    @property
    def bits_per_weight(self) -> float | None:
        """For each weight under a mask."""
        return self.bits_per(self.weights) if self.weights else None

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        about = asdict(self.metadata)
        about["leans_on"] = list(about.pop("depends_on"))
        about["classes"] = None if about["classes"] is None else list(about["classes"])
        return {
            **about,
            "head_layer": self.head_layer,
            "metrics": dict(self.metrics),
            "backbone": self.backbone,
            "size": self.size,
            "bytes": dict(self.bytes),
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight,
        }

    def listed(self, name: str, weights: int) -> dict[str, Any]:
        """A task in a list of tasks, as JSON; `weights` is how many of the backbone's a task can transform."""
        split, share = accuracy(self.metrics)
        return {
            "name": name,
            "method": self.metadata.method,
            "classes": None if self.metadata.classes is None else len(self.metadata.classes),
            "accuracy": share,
            "measured_on": split,
            "bytes": self.size,
            "bits_per_weight": self.bits_per(weights),
        }


def read_summary(path: str | Path) -> Summary:
    """Read a task file and check its header and checksum."""
    data, source = read_whole(path), str(path)
    about, entries, _ = read_header(data, source)
    metadata, shapes = read_metadata(about, source), read_shapes(about, source)
    head_layer = tuple(layer) if isinstance(layer := about["head_layer"], list) else layer
    sizes = {key: end - begin for key, entry in entries.items() for begin, end in [entry["data_offsets"]]}
    dimensions = {key: len(entry["shape"]) for key, entry in entries.items()}
    taken = by_kind(sizes, len(data), dimensions, metadata.head, head_layer)
    masked = [name for name in shapes if {f"{name}:mask", f"{name}:mask{CODED}", MASKS} & entries.keys()]
    masked += [name for name, shape in shapes.items() if LEVELS in entries and len(shape) > 1]
    weights = sum(math.prod(shapes[name]) for name in masked)
    return Summary(metadata, about["backbone"], head_layer, about["metrics"], taken, weights)


def accuracy(metrics: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """On test images where there were some, else on validation at the epoch that was kept."""
    kept = "best" if metrics.get("kept") == "best" else "last"
    for split, key, name in (("test", "test", "accuracy"), ("val", kept, "val_accuracy")):
        held = metrics.get(key)
        value = held.get(name) if isinstance(held, dict) else None
        if isinstance(value, int | float):
            return split, float(value)
    return None, None


def by_kind(
    sizes: Mapping[str, int], size: int, dimensions: Mapping[str, int], head: HeadKind, head_layer: HeadLayer
) -> dict[str, int]:
    """The bytes of a file of `size` by kind, from those of each key and the number of dimensions of each tensor."""
    taken = dict.fromkeys(KINDS, 0)
    for key, count in sizes.items():
        taken[_kind(key, dimensions, head, head_layer)] += count
    taken["header"] = size - sum(taken.values())
    return taken


def _kind(key: str, dimensions: Mapping[str, int], head: HeadKind, head_layer: HeadLayer) -> str:
    if key in PACKED:
        return PACKED[key]
    if key.startswith(DESCRIPTION):
        return "description"
    name, colon, part = key.partition(":")
    layer, _, last = name.rpartition(".")
    layers = head_layer if isinstance(head_layer, tuple) else (head_layer,)
    replaced = head == "classes" and key.startswith(tuple(f"{layer}." for layer in layers))
    if key.startswith(HEAD) or replaced:
        return "head"
    if last in STATISTICS or part.endswith(STATISTICS):
        return "statistics"
    if colon:
        return {"mask": "masks", "free": "masks", "k": "k", "borrowed": "k"}.get(part.removesuffix(CODED), "weights")
    return "norms" if _in_norm(layer, last, dimensions) else "weights"


def _in_norm(layer: str, last: str, dimensions: Mapping[str, int]) -> bool:
    """A file does not say what a layer is; a norm's tensors are vectors, and so is its weight if it has one."""
    weight = dimensions.get(f"{layer}.weight")
    return dimensions[f"{layer}.{last}" if layer else last] <= 1 and weight is not None and weight <= 1

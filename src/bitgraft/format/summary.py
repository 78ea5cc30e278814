"""A summary of a task file from its header alone, so that lists of tasks do not need torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import read_whole
from bitgraft.format.header import CODED, CODES, DESCRIPTION, GRIDS, HEAD, LEVELS, MASKS, NORMS, STEPS, read_header
from bitgraft.format.metadata import FileInfo, read_info

KINDS = ("masks", "levels", "k", "weights", "norms", "statistics", "head", "description", "header")
PACKED = {MASKS: "masks", CODES: "k", GRIDS: "k", NORMS: "norms", LEVELS: "levels", STEPS: "levels"}
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Summary(FileInfo):
    """A task file without its tensors."""

    bytes: dict[str, int]
    """By kind: masks, levels, k, other weights, norm layers, running statistics, head, description, header."""
    weights: int
    """The number of weights with a mask or levels."""

    @property
    def size(self) -> int:
        return sum(self.bytes.values())

    def bits_per(self, weights: int) -> float:
        """Return the size of the file, without head and description, in bits per weight."""
        return 8 * (self.size - self.bytes["head"] - self.bytes["description"]) / weights

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per masked weight."""
        return self.bits_per(self.weights) if self.weights else None

    def plain(self) -> dict[str, Any]:
        """Return the summary as JSON."""
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
        """Return a row for a list of tasks, as JSON; `weights` is the backbone's number of transformable weights."""
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
    return summarize(read_whole(path), str(path))


def summarize(data: memoryview, source: str) -> Summary:
    """Return the summary of a file's bytes."""
    about, entries, _ = read_header(data, source)
    info, taken = read_info(about, source), dict.fromkeys(KINDS, 0)
    dimensions = {key: len(entry["shape"]) for key, entry in entries.items()}
    for key, entry in entries.items():
        begin, end = entry["data_offsets"]
        taken[_kind(key, dimensions, info)] += end - begin
    taken["header"] = len(data) - sum(taken.values())
    masked = [name for name in info.shapes if {f"{name}:mask", f"{name}:mask{CODED}", MASKS} & entries.keys()]
    masked += [name for name, shape in info.shapes.items() if LEVELS in entries and len(shape) > 1]
    return Summary(**vars(info), bytes=taken, weights=sum(math.prod(info.shapes[name]) for name in masked))


def accuracy(metrics: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Return the split and the accuracy: on test images if measured, else on validation images at the kept epoch."""
    kept = "best" if metrics.get("kept") == "best" else "last"
    for split, key, name in (("test", "test", "accuracy"), ("val", kept, "val_accuracy")):
        held = metrics.get(key)
        value = held.get(name) if isinstance(held, dict) else None
        if isinstance(value, int | float):
            return split, float(value)
    return None, None


def _kind(key: str, dimensions: Mapping[str, int], info: FileInfo) -> str:
    if key in PACKED:
        return PACKED[key]
    if key.startswith(DESCRIPTION):
        return "description"
    name, colon, part = key.partition(":")
    layer, _, last = name.rpartition(".")
    heads = info.head_layer if isinstance(info.head_layer, tuple) else (info.head_layer,)
    replaced = info.metadata.head == "classes" and key.startswith(tuple(f"{head}." for head in heads))
    if key.startswith(HEAD) or replaced:
        return "head"
    if last in STATISTICS or part.endswith(STATISTICS):
        return "statistics"
    if colon:
        return {"mask": "masks", "free": "masks", "k": "k", "borrowed": "k"}.get(part.removesuffix(CODED), "weights")
    # A file does not state layer types. A norm's tensors are vectors, its weight included.
    in_norm = dimensions[key] <= 1 and dimensions.get(f"{layer}.weight", 2) <= 1
    return "norms" if in_norm else "weights"

"""A task as one safetensors file, masks packed to bits. `docs/format.md` is the specification."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitgraft.backbone.files import aligned_buffer, check_name, read_whole, write_atomically
from bitgraft.backbone.layers import COUNTER
from bitgraft.errors import CorruptError, TaskError
from bitgraft.format import compact, container, description, entropy_coding
from bitgraft.format.description import Description
from bitgraft.format.header import CODED, HEAD
from bitgraft.format.metadata import Metadata, Shapes, read_metadata, read_shapes, write_metadata
from bitgraft.task import Task
from bitgraft.transforms.bits import packed_size
from bitgraft.transforms.levels import Levels

PACKED = {"mask", "free"}  # parts that hold eight weights' bits to a byte; all others are float32


@dataclass(frozen=True)
class Archive:
    """What is in a task file, read and checked but not yet tied to a backbone."""

    metadata: Metadata
    backbone: str
    """The fingerprint of the backbone that the task belongs to."""
    head_layer: str | tuple[str, ...] | None
    """The backbone's last layer, or layers, as that task's network had it; None for a backbone that gives features."""
    shapes: Shapes
    """The weights that the task transforms, in the order in which data reaches them, with their shapes."""
    metrics: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    format: int = 1
    """2 for a task that is compact: its small tensors take few bytes; 3 for one with a description."""
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The bytes that each key takes in the file that this was read from."""
    description: Description | None = field(default=None, compare=False)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each transform, by the name of the weight that it takes."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            if ":" in key and not key.startswith(HEAD):
                weight, _, part = key.partition(":")
                found.setdefault(weight, {})[part] = tensor
        return found

    def owned(self) -> dict[str, Tensor]:
        """The tensors that replace the backbone's outright, by its names."""
        return {key: tensor for key, tensor in self.tensors.items() if ":" not in key}

    def head(self) -> dict[str, Tensor]:
        """The tensors of a head module, by its own names."""
        return {key.removeprefix(HEAD): t for key, t in self.tensors.items() if key.startswith(HEAD)}


def pack_task(task: Task, backbone: str) -> Archive:
    """A task as its file holds it."""
    transforms, tensors = task.transforms, task.stored()
    if odd := [name for name in [*tensors, *transforms] if ":" in name or f"{name}:" == HEAD]:
        raise TaskError(f"task {task.name!r} cannot be saved: the backbone's name {odd[0]!r} has a colon, or is 'head'")
    for weight, transform in transforms.items():
        tensors |= {f"{weight}:{part}": tensor for part, tensor in transform.parts().items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(COUNTER)}
    if task.head is not None:
        tensors |= {f"{HEAD}{name}": tensor for name, tensor in task.head.state_dict().items()}
    return Archive(
        metadata=task.metadata,
        backbone=backbone,
        head_layer=task.anatomy.head,
        shapes={name: tuple(task.anatomy.tensor(name).shape) for name in transforms},
        metrics=task.metrics,
        tensors={key: _at_rest(key, tensor) for key, tensor in tensors.items()},
        format=3 if task.description is not None else 2 if task.is_compact or _has_levels(task) else 1,
        description=task.description,
    )


def _has_levels(task: Task) -> bool:
    return any(isinstance(one, Levels) for one in task.transforms.values())


def to_bytes(archive: Archive, *, coded: bool = False) -> bytes:
    """The file's bytes. The same task gives the same bytes; coded, masks take about their entropy."""
    return b"".join(_pieces(archive, coded))


def from_bytes(data: bytes | memoryview, source: str = "the task file") -> Archive:
    """Read and check a file's bytes. Whatever is wrong is an `ArchiveError` that says what."""
    if isinstance(data, bytes):
        given, data = data, aligned_buffer(len(data))
        data[:] = given
    about, tensors = container.decode(data, source)
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    metadata, shapes = read_metadata(about, source), read_shapes(about, source)
    described = description.take(tensors, len(metadata.classes or ()), source) if about["format"] > 2 else None
    if about["format"] > 1:
        tensors = compact.unpack(tensors, about, shapes, source)
    tensors = _decoded(tensors, shapes, source)
    head_layer = tuple(layer) if isinstance(layer := about["head_layer"], list) else layer
    read = Archive(metadata, about["backbone"], head_layer, shapes, about["metrics"], tensors, about["format"], sizes)
    read = replace(read, description=described)
    _check_parts(read, source)
    return read


def save(archive: Archive, path: str | Path, *, coded: bool = False) -> None:
    """Write the file whole or not at all: a killed save leaves the old file or none. Its values must be finite."""
    for key, tensor in archive.tensors.items():
        if not _is_finite(tensor):
            raise TaskError(
                f"task {archive.metadata.name!r} is not saved: {key!r} has a NaN or an infinite value; "
                "train it again, at lower rates if it diverged"
            )
    write_atomically(path, *_pieces(archive, coded))


def read_archive(path: str | Path) -> Archive:
    return from_bytes(read_whole(path), str(path))


def rename(archive: Archive, name: str) -> Archive:
    return replace(archive, metadata=replace(archive.metadata, name=check_name(name)))


def rename_dependencies(archive: Archive, names: Sequence[str]) -> Archive:
    """The same task, where those that it depends on go by these names."""
    depends_on = dict(zip(names, archive.metadata.depends_on.values(), strict=True))
    return replace(archive, metadata=replace(archive.metadata, depends_on=depends_on))


def content(archive: Archive) -> str:
    """SHA-256 of what another task can build on: the transforms, and what they depend on themselves, not any names."""
    metadata, digest = archive.metadata, hashlib.sha256()
    top = [metadata.method, list(metadata.depends_on.values())]
    digest.update(json.dumps(top, separators=(",", ":")).encode() + b"\n")
    for key in sorted(key for key in archive.tensors if ":" in key and not key.startswith(HEAD)):
        digest.update(key.encode() + b"\n")
        digest.update(container.raw(archive.tensors[key]))
    return digest.hexdigest()


def _pieces(archive: Archive, coded: bool) -> list[bytes | memoryview]:
    about = {
        **write_metadata(archive.metadata),
        "backbone": archive.backbone,
        "head_layer": archive.head_layer,
        "shapes": dict(archive.shapes),
        "metrics": dict(archive.metrics),
    }
    tensors = _coded(archive.tensors) if coded else archive.tensors
    if archive.format > 1:
        tensors, packed = compact.pack(tensors, archive.shapes)
        about |= packed
    if archive.description is not None:
        tensors = {**tensors, **archive.description.tensors()}
    return container.encode(tensors, about, archive.format)


def _is_packed(key: str) -> bool:
    _, colon, part = key.partition(":")
    return bool(colon) and part in PACKED and not key.startswith(HEAD)


def _coded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Packed parts in their coded form, where that is shorter."""
    found = dict(tensors)
    for key in filter(_is_packed, tensors):
        if tensors[key].numel():
            short = torch.from_numpy(entropy_coding.encode(tensors[key].numpy()))
            if len(short) < len(tensors[key]):
                del found[key]
                found[key + CODED] = short
    return found


def _decoded(tensors: dict[str, Tensor], shapes: Shapes, source: str) -> dict[str, Tensor]:
    found = dict(tensors)
    for coded in [key for key in tensors if key.endswith(CODED) and _is_packed(key.removesuffix(CODED))]:
        key, weight, given = coded.removesuffix(CODED), coded.partition(":")[0], found.pop(coded)
        try:
            if key in tensors or weight not in shapes or given.dtype != torch.uint8 or given.dim() != 1:
                raise ValueError("it is there twice, of another type, or of a weight that has no shape")
            bits = entropy_coding.decode(given.numpy(), packed_size(math.prod(shapes[weight])))
        except ValueError as cause:
            raise CorruptError(f"{source}: {coded!r} is not usable: {cause}") from cause
        found[key] = torch.from_numpy(bits)
    return found


def _check_parts(archive: Archive, source: str) -> None:
    """Parts are those of weights that the file states, and bits are as many as a weight has elements."""
    for name, parts in archive.parts().items():
        if name not in archive.shapes:
            raise CorruptError(f"{source} has parts for {name!r}, but states no shape of it; it is not usable")
        size = packed_size(math.prod(archive.shapes[name]))
        for part in PACKED:
            if part in parts and parts[part].shape != (size,):
                raise CorruptError(
                    f"{source}: '{name}:{part}' is of shape {tuple(parts[part].shape)}, where a weight of shape "
                    f"{archive.shapes[name]} should have {size} bytes; it is not usable"
                )


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """Floats are kept in float32, which holds every narrower one exactly."""
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.float32 if narrow else tensor.dtype


def _is_finite(tensor: Tensor) -> bool:
    """A sum of squares is quick, and finite where every value is, unless some are as large as 1e19."""
    if not tensor.is_floating_point():
        return True
    values = tensor.numpy()
    return math.isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())


def _at_rest(key: str, tensor: Tensor) -> Tensor:
    kind = stored_dtype(tensor) if isinstance(tensor, Tensor) and not tensor.is_meta else None
    if kind not in container.DTYPES:
        what = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TaskError(f"{key!r} cannot be saved: a task file holds tensors of numbers, and this is {what}")
    return tensor.detach().to("cpu", kind).contiguous()

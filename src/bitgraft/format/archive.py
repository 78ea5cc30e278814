"""A task as one safetensors file, with masks packed to bits. `docs/format.md` is the specification."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitgraft.backbone.files import aligned_buffer, check_name, read_whole, write_atomically
from bitgraft.errors import CorruptError, TaskError
from bitgraft.format import compact, container, description, entropy_coding
from bitgraft.format.description import Description
from bitgraft.format.header import CODED, HEAD
from bitgraft.format.metadata import FileInfo, Shapes, read_info, write_info
from bitgraft.task import Task
from bitgraft.transforms.base import COUNTER
from bitgraft.transforms.bits import is_finite, packed_size
from bitgraft.transforms.levels import Levels
from bitgraft.transforms.packed import Packed

PACKED = {"mask", "free"}  # parts with one bit per weight


@dataclass(frozen=True)
class Archive(FileInfo):
    """The contents of a task file, read and checked, but not yet attached to a backbone."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    description: Description | None = field(default=None, compare=False)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each transform, by the name of its weight."""
        found: dict[str, dict[str, Tensor]] = {}
        for key in filter(_is_part, self.tensors):
            weight, _, part = key.partition(":")
            found.setdefault(weight, {})[part] = self.tensors[key]
        return found

    def owned(self) -> dict[str, Tensor]:
        """Return the tensors that replace the backbone's own, by the backbone's names."""
        return {key: tensor for key, tensor in self.tensors.items() if ":" not in key}

    def head(self) -> dict[str, Tensor]:
        """Return the state dict of the head module."""
        return {key.removeprefix(HEAD): t for key, t in self.tensors.items() if key.startswith(HEAD)}


def pack_task(task: Task, backbone: str) -> Archive:
    """Return a task's archive; `backbone` is the fingerprint."""
    transforms, tensors = task.transforms, task.stored()
    if invalid := [name for name in [*tensors, *transforms] if ":" in name or f"{name}:" == HEAD]:
        raise TaskError(f"cannot save task {task.name!r}: the backbone's name {invalid[0]!r} has a colon, or is 'head'")
    for weight, transform in transforms.items():
        learned = ((part, tensor) for part, tensor in transform.named_parameters() if not tensor.is_meta)
        _refuse_odd(task.name, (f"{weight}:{part}" for part, tensor in learned if not is_finite(tensor)))
        if isinstance(transform, Packed):
            _refuse_changed(task, weight)
        tensors |= {f"{weight}:{part}": tensor for part, tensor in transform.parts().items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(COUNTER)}
    if task.head is not None:
        tensors |= {f"{HEAD}{name}": tensor for name, tensor in task.head.state_dict().items()}
    is_compact = task.is_compact or any(isinstance(transform, Levels) for transform in transforms.values())
    depends_on = {earlier.name: content_hash(pack_task(earlier, "")) for earlier in task.earlier}
    return Archive(
        metadata=replace(task.metadata, depends_on=depends_on),
        backbone=backbone,
        head_layer=task.anatomy.head,
        shapes={name: tuple(task.anatomy.tensor(name).shape) for name in transforms},
        metrics=task.metrics,
        tensors={key: _to_stored(key, tensor) for key, tensor in tensors.items()},
        format=3 if task.description is not None else 2 if is_compact else 1,
        description=task.description,
    )


def to_bytes(archive: Archive, *, coded: bool = False) -> bytes:
    """Return the file's bytes, which depend on the task alone. `coded` masks take about their entropy."""
    about = write_info(archive)
    tensors = _encode_masks(archive.tensors) if coded else archive.tensors
    if archive.format > 1:
        tensors, packed = compact.pack(tensors, archive.shapes)
        about |= packed
    if archive.description is not None:
        tensors = {**tensors, **archive.description.tensors()}
    return container.encode(tensors, about)


def from_bytes(data: bytes | memoryview, source: str = "the task file") -> Archive:
    """Read and check a file's bytes. Any fault is an `ArchiveError`."""
    if isinstance(data, bytes):
        given, data = data, aligned_buffer(len(data))
        data[:] = given
    about, tensors = container.decode(data, source)
    info = read_info(about, source)
    described = description.take(tensors, len(info.metadata.classes or ()), source) if info.format > 2 else None
    if info.format > 1:
        tensors = compact.unpack(tensors, about, info.shapes, source)
    archive = Archive(**vars(info), tensors=_decode_masks(tensors, info.shapes, source), description=described)
    _check_parts(archive, source)
    return archive


def save(archive: Archive, path: str | Path, *, coded: bool = False) -> None:
    """Write the file atomically. All values must be finite."""
    floats = ((key, tensor.numpy()) for key, tensor in archive.tensors.items() if tensor.is_floating_point())
    _refuse_odd(archive.metadata.name, (key for key, values in floats if not np.isfinite(values).all()))
    write_atomically(path, to_bytes(archive, coded=coded))


def _refuse_odd(task: str, odd: Iterable[str]) -> None:
    """Refuse to save a task if any of its tensors is not finite."""
    if key := next(iter(odd), None):
        raise TaskError(
            f"task {task!r} is not saved: {key!r} has a NaN or an infinite value; "
            "train it again, at lower rates if it diverged"
        )


def _refuse_changed(task: Task, weight: str) -> None:
    """Refuse to save a PackNet task that was trained with other weights than those in the earlier tasks' files."""
    chain, one = list[Packed](), task
    while isinstance(transform := one.transforms.get(weight), Packed):
        chain.append(transform)
        if not one.earlier:
            break
        one = one.earlier[0]
    if len(chain) > 1 and not chain[0].builds_on(chain[1], chain[-1], task.anatomy.tensor(weight)):
        raise TaskError(
            f"task {task.name!r} is not saved: the earlier task {task.earlier[0].name!r} has changed since "
            f"{task.name!r} was trained; load the earlier one's own state again"
        )


def read_archive(path: str | Path) -> Archive:
    """Read and check a task file. It needs no backbone; to run the task, use `Network.load_task`."""
    return from_bytes(read_whole(path), str(path))


def rename(archive: Archive, name: str) -> Archive:
    return replace(archive, metadata=replace(archive.metadata, name=check_name(name)))


def rename_dependencies(archive: Archive, names: Sequence[str]) -> Archive:
    depends_on = dict(zip(names, archive.metadata.depends_on.values(), strict=True))
    return replace(archive, metadata=replace(archive.metadata, depends_on=depends_on))


def content_hash(archive: Archive) -> str:
    """Return the SHA-256 of what other tasks can build on: the transforms and the task's own dependencies, no names."""
    metadata, digest = archive.metadata, hashlib.sha256()
    top = [metadata.method, list(metadata.depends_on.values())]
    digest.update(json.dumps(top, separators=(",", ":")).encode() + b"\n")
    for key in sorted(filter(_is_part, archive.tensors)):
        digest.update(key.encode() + b"\n")
        digest.update(container.raw(archive.tensors[key]))
    return digest.hexdigest()


def _is_part(key: str) -> bool:
    return ":" in key and not key.startswith(HEAD)


def _is_packed(key: str) -> bool:
    return _is_part(key) and key.partition(":")[2] in PACKED


def _encode_masks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace packed masks by their coded form where that is shorter."""
    found = dict(tensors)
    for key in filter(_is_packed, tensors):
        if tensors[key].numel():
            coded = torch.from_numpy(entropy_coding.encode(tensors[key].numpy()))
            if len(coded) < len(tensors[key]):
                del found[key]
                found[key + CODED] = coded
    return found


def _decode_masks(tensors: dict[str, Tensor], shapes: Shapes, source: str) -> dict[str, Tensor]:
    found = dict(tensors)
    for coded in [key for key in tensors if key.endswith(CODED) and _is_packed(key.removesuffix(CODED))]:
        key, weight, given = coded.removesuffix(CODED), coded.partition(":")[0], found.pop(coded)
        try:
            if key in tensors or weight not in shapes or given.dtype != torch.uint8 or given.dim() != 1:
                raise ValueError("it is a duplicate, has another type, or its weight has no shape")
            bits = entropy_coding.decode(given.numpy(), packed_size(math.prod(shapes[weight])))
        except ValueError as cause:
            raise CorruptError(f"{source} is corrupt: cannot decode {coded!r} ({cause})") from cause
        found[key] = torch.from_numpy(bits)
    return found


def _check_parts(archive: Archive, source: str) -> None:
    """Check that every weight with parts has a shape, and that packed parts have one bit per element."""
    for name, parts in archive.parts().items():
        if name not in archive.shapes:
            raise CorruptError(f"{source} is corrupt: {name!r} has parts but no shape")
        size = packed_size(math.prod(archive.shapes[name]))
        for part in PACKED & parts.keys():
            if parts[part].shape != (size,):
                raise CorruptError(
                    f"{source} is corrupt: '{name}:{part}' has shape {tuple(parts[part].shape)}, but a weight of shape "
                    f"{archive.shapes[name]} needs {size} bytes"
                )


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32 for narrower floats, which it holds exactly; other dtypes stay."""
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.float32 if narrow else tensor.dtype


def refuse_unstorable(task: str, owned: Mapping[str, Tensor]) -> None:
    """Raise if a new task would own a tensor of a dtype that a task file cannot hold."""
    for name, tensor in owned.items():
        if stored_dtype(tensor) not in container.DTYPES:
            raise TaskError(
                f"task {task!r} would own {name!r}, which is {tensor.dtype} and fits in no task file: choose a method "
                "that leaves it to the backbone, such as full"
            )


def _to_stored(key: str, tensor: Tensor) -> Tensor:
    dtype = stored_dtype(tensor) if isinstance(tensor, Tensor) and not tensor.is_meta else None
    if dtype not in container.DTYPES:
        found = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TaskError(f"cannot save {key!r}: a task file holds tensors with values, and this is {found}")
    return tensor.detach().to("cpu", dtype).contiguous()

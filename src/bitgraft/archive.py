"""A task as one safetensors file, masks packed to bits. `docs/format.md` is the specification."""

import contextlib
import hashlib
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bitgraft.anatomy import Anatomy, describe
from bitgraft.errors import BitgraftError, ClassesError, CorruptError, NewerFormatError, TaskError, WrongBackboneError
from bitgraft.methods import registry
from bitgraft.task import Card, Task, check_name
from bitgraft.transforms import Transform

FORMAT = 1
BLANK = "0" * 64
CHECKSUM = re.compile(rb'(?<=\\"checksum\\":\\")[0-9a-f]{64}(?=\\")')
HEAD = "head:"  # keys of a head module's own tensors; those of the backbone's last layer keep its names


@dataclass(frozen=True)
class Archive:
    """What is in a task file, read and checked but not yet tied to a backbone."""

    card: Card
    backbone: str
    """The fingerprint of the backbone that the task belongs to."""
    metrics: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each transform, by the name of the weight that it takes."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            weight, colon, part = key.partition(":")
            if colon and not key.startswith(HEAD):
                found.setdefault(weight, {})[part] = tensor
        return found


def pack_task(task: Task, backbone: str) -> Archive:
    """A task as its file holds it."""
    tensors = {f"{w}:{part}": t for w, transform in task.transforms.items() for part, t in transform.parts().items()}
    tensors |= {name: t for name, t in task.owned.items() if not name.endswith("num_batches_tracked")}
    if task.head is not None:
        tensors |= {f"{HEAD}{name}": tensor for name, tensor in task.head.state_dict().items()}
    return Archive(task.card, backbone, task.metrics, {key: _plain(tensor) for key, tensor in tensors.items()})


def to_bytes(archive: Archive) -> bytes:
    """The file's bytes. The same task gives the same bytes."""
    card = archive.card
    names = card.classes
    about = {
        "checksum": BLANK,
        "format": FORMAT,
        "name": card.name,
        "method": card.method,
        "options": dict(card.options),
        "head": card.head,
        "classes": len(names) if names is not None and names == tuple(map(str, range(len(names)))) else names,
        "preprocessing": dict(card.preprocessing),
        "backbone": archive.backbone,
        "leans_on": dict(card.leans_on),
        "metrics": dict(archive.metrics),
    }
    try:
        text = json.dumps(about, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise TaskError(f"task {card.name!r}: preprocessing and metrics must be plain JSON data ({cause})") from cause
    data = safetensors.torch.save(dict(archive.tensors), metadata={"bitgraft": text})
    return CHECKSUM.sub(hashlib.sha256(data).hexdigest().encode(), data, count=1)


def from_bytes(data: bytes, source: str = "the task file") -> Archive:
    """Read and check a file's bytes; every fault is a `CorruptError`, or says that the format is newer."""
    about = _metadata(data, source)
    if about.get("format") != FORMAT:
        if isinstance(about.get("format"), int) and about["format"] > FORMAT:
            raise NewerFormatError(
                f"{source} is of task format {about['format']}, this bitgraft reads up to {FORMAT}: install a newer bitgraft"
            )
        raise CorruptError(f"{source} states no format that bitgraft knows: it is damaged, or not a task file")
    blanked = CHECKSUM.sub(BLANK.encode(), data, count=1)
    if hashlib.sha256(blanked).hexdigest() != about.get("checksum"):
        raise CorruptError(f"{source} does not match its checksum: it is damaged; get a fresh copy")
    try:
        tensors = safetensors.torch.load(data)
        classes = about["classes"]
        card = Card(
            name=check_name(about["name"]),
            method=registry.get(about["method"]).name,
            options=dict(about["options"]),
            head=about["head"],
            classes=tuple(map(str, range(classes)))
            if isinstance(classes, int)
            else tuple(classes)
            if classes
            else None,
            preprocessing=dict(about["preprocessing"]),
            leans_on={check_name(name): str(digest) for name, digest in about["leans_on"].items()},
        )
        return Archive(card, str(about["backbone"]), dict(about["metrics"]), tensors)
    except BitgraftError:
        raise
    except Exception as cause:  # a file whose checksum holds but that bitgraft has not written
        raise CorruptError(f"{source} is not a valid task file ({type(cause).__name__}: {cause})") from cause


def save(archive: Archive, path: str | Path) -> None:
    """Write the file whole or not at all: a killed save leaves the old file or none."""
    write_atomically(Path(path), to_bytes(archive))


def read_archive(path: str | Path) -> Archive:
    try:
        data = Path(path).read_bytes()
    except OSError as cause:
        raise CorruptError(f"cannot read {path}: {cause.strerror}") from cause
    return from_bytes(data, str(path))


def revive(archive: Archive, anatomy: Anatomy, before: Mapping[str, Transform], head: nn.Module | None) -> Task:
    """The task that a file holds, frozen, on the backbone that it belongs to."""
    card = archive.card
    method = registry.get(card.method)
    options = method.with_options(card.options)
    transforms, stray = {}, set(archive.parts()) - set(anatomy.places)
    if stray or (method.build is None and archive.parts()):
        raise WrongBackboneError(
            f"task {card.name!r} transforms weights that the backbone does not have: {sorted(stray)[:3]}"
        )
    for name, parts in archive.parts().items():
        tensor = anatomy.tensor(name).detach()
        weight = describe(anatomy, name)
        assert method.build is not None
        blank = method.build(weight, tensor if method.leans else tensor.to("meta"), options, None, before.get(name))
        if blank is None:
            raise CorruptError(f"task {card.name!r} has parts for {name!r}, which method {card.method!r} leaves alone")
        blank.restore(parts)
        transforms[name] = blank
    owned = {key: _revived(key, tensor, anatomy) for key, tensor in archive.tensors.items() if ":" not in key}
    counters = {n.rpartition(".")[0] + ".num_batches_tracked" for n in owned}
    owned |= {n: anatomy.tensor(n).detach().clone() for n in anatomy.places if n in counters}
    own_head = _revive_head(archive, anatomy, head)
    _check_classes(archive, anatomy, owned, own_head)
    return Task(card, anatomy, transforms, owned, own_head).freeze()


def rename(archive: Archive, name: str) -> Archive:
    return replace(archive, card=replace(archive.card, name=check_name(name)))


def content(archive: Archive) -> str:
    """SHA-256 of a task's tensors, by which another task leans on it."""
    return hashlib.sha256(safetensors.torch.save(dict(archive.tensors))).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the file, make sure that it is on disk, then put it in the file's place in one step."""
    _sweep(path)
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(path: Path) -> None:
    """Remove what a save of this file left behind when it was killed an hour ago or longer."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", kind).contiguous()


def _metadata(data: bytes, source: str) -> dict[str, Any]:
    """The bitgraft part of a safetensors header, without trusting anything about it."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        if size > len(data) - 8:
            raise ValueError(f"its header claims {size} bytes of {len(data)}")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["bitgraft"])
        if not isinstance(about, dict):
            raise ValueError("its metadata is not an object")
        return about
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise CorruptError(f"{source} is truncated, damaged, or not a task file ({cause})") from cause


def _revived(name: str, tensor: Tensor, anatomy: Anatomy) -> Tensor:
    if name not in anatomy.places:
        raise WrongBackboneError(f"the task replaces {name!r}, which the backbone does not have")
    model = anatomy.tensor(name)
    if tensor.shape != model.shape and name not in anatomy.head_names():
        raise WrongBackboneError(
            f"the task's {name!r} has shape {tuple(tensor.shape)}, the backbone's has {tuple(model.shape)}"
        )
    if isinstance(model, nn.Parameter):
        return nn.Parameter(tensor.to(model.device), requires_grad=False)
    return tensor.to(model.device, model.dtype)


def _revive_head(archive: Archive, anatomy: Anatomy, given: nn.Module | None) -> nn.Module | None:
    state = {key.removeprefix(HEAD): t for key, t in archive.tensors.items() if key.startswith(HEAD)}
    name, kind = archive.card.name, archive.card.head
    if kind == "linear":
        if set(state) != {"weight", "bias"}:
            raise CorruptError(f"task {name!r} should have a linear head; the file is not usable")
        given = nn.Linear(state["weight"].shape[1], state["weight"].shape[0], device="meta")
    elif kind != "module":
        return None
    if given is None:
        raise TaskError(
            f"task {name!r} was saved with a head module of its own: pass one like it, load_task(path, head=...)"
        )
    try:
        given.load_state_dict(state, assign=True)
    except RuntimeError as cause:
        raise TaskError(f"the head module does not fit that of task {name!r}: {cause}") from cause
    device = next(iter(anatomy.places), None)
    return given.to(anatomy.tensor(device).device) if device else given


def _check_classes(archive: Archive, anatomy: Anatomy, owned: Mapping[str, Tensor], head: nn.Module | None) -> None:
    classes = archive.card.classes
    if classes is None:
        return
    weight = owned.get(f"{anatomy.head}.weight") if archive.card.head == "classes" else getattr(head, "weight", None)
    if archive.card.head in ("classes", "linear") and (weight is None or weight.shape[0] != len(classes)):
        rows = "no" if weight is None else weight.shape[0]
        raise ClassesError(
            f"task {archive.card.name!r} lists {len(classes)} classes, but its head has {rows} outputs; the file is not usable"
        )

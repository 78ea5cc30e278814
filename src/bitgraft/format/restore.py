"""Build a task on its backbone from an archive. Everything is checked before anything is changed."""

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy, describe
from bitgraft.errors import ClassesError, CorruptError, TaskError, WrongBackboneError
from bitgraft.format.archive import PACKED, Archive, stored_dtype
from bitgraft.format.metadata import Metadata
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.base import COUNTER, PART_DTYPES, Transform, Weight, strided_like


def restore_task(
    archive: Archive, anatomy: Anatomy, before: Sequence[Mapping[str, Transform]], head: nn.Module | None
) -> Task:
    """Return the archived task, frozen, on its backbone.

    `before` are the transforms of its dependencies, in the file's order.
    """
    metadata, parts, owned = archive.metadata, archive.parts(), archive.owned()
    base, options = anatomy.tensors(), registry.get(metadata.method).with_options(metadata.options)
    _check_backbone(archive, anatomy, base)
    transforms = {
        name: _restore_transform(
            metadata,
            options,
            describe(anatomy, name),
            base[name],
            registry.earlier_transforms(name, before),
            parts.get(name, {}),
        )
        for name in archive.shapes
    }
    _check_owned(metadata, anatomy, base, owned, options)
    _check_classes(archive, anatomy, base, owned)
    held = {}
    for name, tensor in base.items():
        if name in owned:
            held[name] = _like(tensor, owned[name])
        elif name.endswith(COUNTER) and name.removesuffix(COUNTER) + "running_mean" in owned:
            held[name] = tensor.clone()
    task = Task(metadata, anatomy, transforms, held, _restore_head(archive, anatomy, head))
    task.metrics, task.is_compact = dict(archive.metrics), archive.format > 1
    task.description = archive.description
    return task


def _check_backbone(archive: Archive, anatomy: Anatomy, base: Mapping[str, Tensor]) -> None:
    """Check that the backbone has the transformed weights, with these shapes, and the same head layer."""
    task, head = f"task {archive.metadata.name!r}", archive.head_layer
    for name, shape in archive.shapes.items():
        found = base.get(name)
        least = 1 if name in anatomy.norm_of else 2
        if not isinstance(found, nn.Parameter) or not found.is_floating_point() or found.dim() < least:
            raise WrongBackboneError(f"{task} transforms {name!r}, which is not a weight of the backbone")
        if found.shape != shape:
            raise WrongBackboneError(f"{task} has {name!r} of shape {shape}, the backbone {tuple(found.shape)}")
    if archive.metadata.head in ("classes", "keep", "linear") and head != anatomy.head:
        raise WrongBackboneError(
            f"{task} expects {head!r} as the backbone's last layer, this one has {anatomy.head!r}: "
            f"pass Network(backbone, head={head!r})"
        )


def _restore_transform(
    metadata: Metadata,
    options: registry.Options,
    weight: Weight,
    tensor: Tensor,
    before: Sequence[Transform],
    parts: Mapping[str, Tensor],
) -> Transform:
    """Return the transform of one weight, with the file's values."""
    build, corrupt = registry.get(metadata.method).build, f"task {metadata.name!r} is corrupt"
    try:
        transform = build(weight, tensor.detach(), options, None, before) if build else None
    except TaskError as cause:
        raise CorruptError(f"{corrupt}: {cause}") from cause
    if transform is None:
        raise CorruptError(f"{corrupt}: method {metadata.method!r} does not transform {weight.name!r}")
    used = tensor.numel() % 8  # bits of the last byte of a mask, 0 if all
    for part, value in parts.items():
        key, expected = f"{weight.name}:{part}", PART_DTYPES.get(part, torch.float32)
        if value.dtype != expected:
            raise CorruptError(f"{corrupt}: {key!r} is {value.dtype}, expected {expected}")
        if part in PACKED and used and int(value[-1]) >> used:
            raise CorruptError(f"{corrupt}: {key!r} has bits set after the last weight")
    transform.restore({part: value.to(tensor.device) for part, value in parts.items()})
    return transform


def _check_owned(
    metadata: Metadata,
    anatomy: Anatomy,
    base: Mapping[str, Tensor],
    owned: Mapping[str, Tensor],
    options: registry.Options,
) -> None:
    """Check that the task owns what its method and options say, apart from the head, and only complete norm layers."""
    method, head, norms = registry.get(metadata.method), set(anatomy.head_names()), anatomy.norm_of
    chosen = {name for pattern in options.own for name in base if fnmatchcase(name, pattern)}
    allowed = chosen | (norms.keys() if options.norms else set())
    if method.owns_everything:
        allowed |= base.keys()  # also norm layers that are left out by Network(norms=...)
    for name, tensor in owned.items():
        if name not in base:
            raise WrongBackboneError(f"task {metadata.name!r} replaces {name!r}, which the backbone does not have")
        if name not in head:
            _check_fit(metadata, name, tensor, base[name])
            if name not in allowed or name.endswith(COUNTER):
                raise CorruptError(
                    f"task {metadata.name!r} is corrupt: method {metadata.method!r} does not replace {name!r}"
                )
    layers = {norms[name] for name in owned if name in norms and name not in chosen}
    lacking = {name for name, layer in norms.items() if name not in owned and layer in layers}
    if method.owns_everything:
        lacking |= base.keys() - norms.keys() - head - owned.keys()
    if missing := sorted(name for name in lacking if not name.endswith(COUNTER)):
        raise CorruptError(f"task {metadata.name!r} is corrupt: {missing[0]!r} is missing")


def _check_fit(metadata: Metadata, name: str, tensor: Tensor, model: Tensor, outputs: int | None = None) -> None:
    shape = model.shape if outputs is None else (outputs, *model.shape[1:])
    if tensor.shape != shape:
        raise WrongBackboneError(
            f"task {metadata.name!r} has {name!r} of shape {tuple(tensor.shape)}, the backbone needs {tuple(shape)}"
        )
    dtype = torch.float32 if isinstance(model, nn.Parameter) and model.is_floating_point() else stored_dtype(model)
    if tensor.dtype != dtype and not (tensor.dtype == torch.float32 and model.is_floating_point()):
        raise CorruptError(f"task {metadata.name!r} is corrupt: {name!r} is {tensor.dtype}, expected {dtype}")


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    """Move a tensor to the backbone's device and memory format, which affects the last bits, without needless copies.

    Buffers also get the backbone's dtype.
    """
    learned = isinstance(model, nn.Parameter)
    placed = tensor.to(model.device, tensor.dtype if learned else model.dtype)
    if placed.dim() > 1 and placed.shape == model.shape:
        placed = strided_like(model, placed)
    return nn.Parameter(placed, requires_grad=False) if learned else placed


def _check_classes(archive: Archive, anatomy: Anatomy, base: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check that the head has one row per class, and that a replaced last layer is complete."""
    metadata, names = archive.metadata, anatomy.head_names()
    replaced = {name: own[name] for name in names if name in own}
    count, kind = len(metadata.classes or ()), metadata.head
    if kind != "classes" and replaced:
        raise CorruptError(
            f"task {metadata.name!r} is corrupt: it has {sorted(replaced)}, which a head of kind {kind!r} does not use"
        )
    held = replaced if kind == "classes" else archive.head() if kind == "linear" else {}
    rows = {(*tensor.shape, 0 if kind == "classes" else count)[0] for tensor in held.values()}
    if rows - {count}:
        raise ClassesError(
            f"task {metadata.name!r} is corrupt: it lists {count} classes, but its head has "
            f"{min(rows - {count})} outputs"
        )
    if kind == "classes":
        if not replaced or len(replaced) != len(names):
            raise CorruptError(f"task {metadata.name!r} is corrupt: its head needs {sorted(names)}")
        for name, tensor in replaced.items():
            _check_fit(metadata, name, tensor, base[name], count)


def _restore_head(archive: Archive, anatomy: Anatomy, given: nn.Module | None) -> nn.Module | None:
    state, metadata = archive.head(), archive.metadata
    task = f"task {metadata.name!r}"
    if given is not None and metadata.head != "module":
        raise TaskError(f"{task} has no head module (its head is of kind {metadata.head!r}): load it without head=...")
    if given is None and metadata.head == "module":
        raise TaskError(f"{task} was saved with a head module: pass one like it, load_task(path, head=...)")
    if metadata.head == "linear":
        given = nn.Linear(anatomy.features or 1, len(metadata.classes or ()), device="meta")
    if given is None:
        if state:
            raise CorruptError(f"{task} is corrupt: it has tensors of a head module, but head kind {metadata.head!r}")
        return None
    model = given.state_dict()
    expected = {name: (tuple(t.shape), stored_dtype(t)) for name, t in model.items()}
    found = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    if expected != found:
        odd = min(name for name in expected | found if expected.get(name) != found.get(name))
        raise (CorruptError if metadata.head == "linear" else TaskError)(
            f"the head module does not match {task}: its {odd!r} is {expected.get(odd)}, the file's {found.get(odd)}"
        )
    device, given = anatomy.device, copy.deepcopy(given)  # the caller may pass the same module for another task
    given.load_state_dict({name: t.to(device, model[name].dtype) for name, t in state.items()}, assign=True)
    return given.to(device).requires_grad_(False)

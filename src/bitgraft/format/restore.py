"""From what a file holds to a task on its backbone, everything checked before anything is changed."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy, describe
from bitgraft.backbone.layers import COUNTER
from bitgraft.errors import ClassesError, CorruptError, TaskError, WrongBackboneError
from bitgraft.format.archive import PACKED, Archive, stored_dtype
from bitgraft.format.metadata import Metadata
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.base import Transform, Weight, strided_like
from bitgraft.transforms.bits import packed_size

KINDS = dict.fromkeys(PACKED, torch.uint8) | {"levels": torch.int8}
"""Of parts that are not float32."""


def restore_task(
    archive: Archive, anatomy: Anatomy, before: Sequence[Mapping[str, Transform]], head: nn.Module | None
) -> Task:
    """The task that a file holds, frozen, on the backbone that it belongs to. What does not fit changes nothing.

    `before` are the transforms of the tasks that it depends on, in its file's order.
    """
    metadata, parts, owned = archive.metadata, archive.parts(), archive.owned()
    base = anatomy.tensors()
    _check_places(archive, anatomy, base)
    options = registry.get(metadata.method).with_options(metadata.options)
    transforms = {}
    for name in archive.shapes:
        blank = _blank_transform(
            metadata, describe(anatomy, name), base[name], options, registry.earlier_transforms(name, before)
        )
        transforms[name] = _fill(blank, name, base[name], parts.get(name, {}))
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


def _check_places(archive: Archive, anatomy: Anatomy, base: Mapping[str, Tensor]) -> None:
    """The backbone has the weights that the file states, of those shapes, and the head where the file says."""
    task, head = f"task {archive.metadata.name!r}", archive.head_layer
    for name, shape in archive.shapes.items():
        found = base.get(name)
        least = 1 if name in anatomy.norm_of else 2
        if not isinstance(found, nn.Parameter) or not found.is_floating_point() or found.dim() < least:
            raise WrongBackboneError(f"{task} transforms {name!r}, which is no weight of the backbone")
        if found.shape != shape:
            raise WrongBackboneError(
                f"{task} has {name!r} of shape {shape}, the backbone has it in {tuple(found.shape)}"
            )
    if archive.metadata.head in ("classes", "keep", "linear") and head != anatomy.head:
        raise WrongBackboneError(
            f"{task} belongs to a backbone whose last layer is {head!r}, this one's is {anatomy.head!r}: "
            f"pass Network(backbone, head={head!r})"
        )


def _blank_transform(
    metadata: Metadata, weight: Weight, tensor: Tensor, options: registry.Options, before: Sequence[Transform]
) -> Transform:
    """A transform of the right make, whose values are still to come."""
    build = registry.get(metadata.method).build
    try:
        blank = build(weight, tensor.detach(), options, None, before) if build else None
    except TaskError as cause:
        raise CorruptError(f"task {metadata.name!r} cannot have been made as its file says ({cause})") from cause
    if blank is None:
        raise CorruptError(f"task {metadata.name!r} has {weight.name!r}, which method {metadata.method!r} leaves alone")
    return blank


def _fill(blank: Transform, name: str, weight: Tensor, parts: Mapping[str, Tensor]) -> Transform:
    buffers = blank.named_buffers() if blank.tail is not None else ()
    counters = {part: torch.zeros_like(t) for part, t in buffers if part.endswith(COUNTER)}
    for part, tensor in parts.items():
        kind = "nothing" if part in counters else KINDS.get(part, torch.float32)
        if tensor.dtype != kind:
            raise CorruptError(f"'{name}:{part}' is {tensor.dtype}, where {kind} belongs; the file is not usable")
        if part in PACKED and _has_tail(tensor, weight.numel()):
            raise CorruptError(f"'{name}:{part}' has bits set behind the last weight; the file is not usable")
    blank.restore({part: tensor.to(weight.device) for part, tensor in {**parts, **counters}.items()})
    return blank


def _has_tail(packed: Tensor, count: int) -> bool:
    return count % 8 != 0 and packed.shape == (packed_size(count),) and int(packed[-1]) >> count % 8 != 0


def _check_owned(
    metadata: Metadata,
    anatomy: Anatomy,
    base: Mapping[str, Tensor],
    owned: Mapping[str, Tensor],
    options: registry.Options,
) -> None:
    """Head apart, a task owns what its method and options give it, nothing else, and no half of a norm layer."""
    method, head, norms = registry.get(metadata.method), set(anatomy.head_names()), anatomy.norm_of
    asked = {name for pattern in options.own for name in base if fnmatchcase(name, pattern)}
    given = asked | (norms.keys() if options.norms else set())
    if method.owns_everything:
        given |= base.keys() - norms.keys()
    for name, tensor in owned.items():
        if name not in base:
            raise WrongBackboneError(f"task {metadata.name!r} replaces {name!r}, which the backbone does not have")
        if name not in head:
            _check_fit(metadata, name, tensor, base[name])
            if name not in given or name.endswith(COUNTER):
                raise CorruptError(f"task {metadata.name!r} has {name!r}, which {metadata.method!r} leaves alone")
    layers = {norms[name] for name in owned if name in norms and name not in asked}
    lacking = {name for name, layer in norms.items() if name not in owned and layer in layers}
    if method.owns_everything:
        lacking |= base.keys() - norms.keys() - head - owned.keys()
    if missing := sorted(name for name in lacking if not name.endswith(COUNTER)):
        raise CorruptError(f"task {metadata.name!r} lacks {missing[0]!r}; the file is not usable")


def _check_fit(metadata: Metadata, name: str, tensor: Tensor, model: Tensor, outputs: int | None = None) -> None:
    shape = model.shape if outputs is None else (outputs, *model.shape[1:])
    if tensor.shape != shape:
        raise WrongBackboneError(
            f"task {metadata.name!r} has {name!r} of shape {tuple(tensor.shape)}, the backbone takes {tuple(shape)}"
        )
    kind = torch.float32 if isinstance(model, nn.Parameter) and model.is_floating_point() else stored_dtype(model)
    if tensor.dtype != kind and not (tensor.dtype == torch.float32 and model.is_floating_point()):
        raise CorruptError(f"task {metadata.name!r} has {name!r} in {tensor.dtype}, where {kind} belongs: not usable")


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    """On the backbone's device; statistics in its dtype; in its memory format, since that decides the last bits.

    Where nothing is to be changed, it stays in the memory that the file was read into.
    """
    learned = isinstance(model, nn.Parameter)
    placed = tensor.to(model.device, tensor.dtype if learned else model.dtype)
    if placed.dim() > 1 and placed.shape == model.shape:
        placed = strided_like(model, placed)
    return nn.Parameter(placed, requires_grad=False) if learned else placed


def _check_classes(archive: Archive, anatomy: Anatomy, base: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """The head has one row for each class; the tensors of the backbone's last layer are all there, in its shape."""
    metadata, replaced = archive.metadata, {name: own[name] for name in anatomy.head_names() if name in own}
    count, kind = len(metadata.classes or ()), metadata.head
    if kind != "classes" and replaced:
        raise CorruptError(f"task {metadata.name!r} has {sorted(replaced)}, but no head that takes them")
    held = replaced if kind == "classes" else archive.head() if kind == "linear" else {}
    rows = {(*tensor.shape, 0 if kind == "classes" else count)[0] for tensor in held.values()}
    if rows - {count}:
        raise ClassesError(
            f"task {metadata.name!r} lists {count} classes, but its head has {min(rows - {count})} outputs; "
            "the file is not usable"
        )
    if kind == "classes":
        if len(replaced) != len(anatomy.head_names()) or not replaced:
            raise CorruptError(
                f"task {metadata.name!r} should have {sorted(anatomy.head_names())} for its head: not usable"
            )
        for name, tensor in replaced.items():
            _check_fit(metadata, name, tensor, base[name], count)


def _restore_head(archive: Archive, anatomy: Anatomy, given: nn.Module | None) -> nn.Module | None:
    state, metadata = archive.head(), archive.metadata
    task = f"task {metadata.name!r}"
    if given is not None and metadata.head != "module":
        raise TaskError(
            f"{task} was not saved with a head module of its own (its head is of kind {metadata.head!r}): "
            "load it without head=..."
        )
    if given is None and metadata.head == "module":
        raise TaskError(f"{task} was saved with a head module of its own: pass one like it, load_task(path, head=...)")
    if metadata.head == "linear":
        given = nn.Linear(anatomy.features or 1, len(metadata.classes or ()), device="meta")
    if given is None:
        if state:
            raise CorruptError(f"{task} has tensors of a head, but is of head kind {metadata.head!r}: not usable")
        return None
    model = given.state_dict()
    wanted = {name: (tuple(t.shape), stored_dtype(t)) for name, t in model.items()}
    found = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    if wanted != found:
        odd = min(name for name in wanted | found if wanted.get(name) != found.get(name))
        raise (CorruptError if metadata.head == "linear" else TaskError)(
            f"the head module does not fit that of {task}: it has {odd!r} as {wanted.get(odd)}, "
            f"the file as {found.get(odd)}"
        )
    device = anatomy.device
    given.load_state_dict({name: t.to(device, model[name].dtype) for name, t in state.items()}, assign=True)
    return given.to(device).requires_grad_(False)

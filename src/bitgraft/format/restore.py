"""Build a task on its backbone from an archive. Everything is checked before anything is changed."""

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import Anatomy, describe
from bitgraft.errors import ClassesError, CorruptError, TaskError, WrongBackboneError
from bitgraft.format.archive import PACKED, Archive, stored_dtype
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.base import COUNTER, PART_DTYPES, Transform, Weight, strided_like


def restore_task(
    archive: Archive, anatomy: Anatomy, before: Sequence[Mapping[str, Transform]], head: nn.Module | None
) -> Task:
    """Return the archived task, frozen, on its backbone.

    `before` are the transforms of its dependencies, in the file's order.
    """
    return _Restoration(archive, anatomy).task(before, head)


class _Restoration:
    """An archive and the backbone that its task is restored on."""

    def __init__(self, archive: Archive, anatomy: Anatomy) -> None:
        self.archive, self.anatomy, self.metadata = archive, anatomy, archive.metadata
        self.method = registry.get(self.metadata.method)
        self.options = self.method.with_options(self.metadata.options)
        self.base, self.owned, self.head_names = anatomy.tensors(), archive.owned(), anatomy.head_names()
        self.name = f"task {self.metadata.name!r}"
        self.corrupt = f"{self.name} is corrupt"

    def task(self, before: Sequence[Mapping[str, Transform]], head: nn.Module | None) -> Task:
        archive, parts = self.archive, self.archive.parts()
        self.check_backbone()
        transforms = {
            name: self.transform(describe(self.anatomy, name), registry.earlier_transforms(name, before), parts)
            for name in archive.shapes
        }
        self.check_owned()
        self.check_classes()
        held = {}
        for name, tensor in self.base.items():
            if name in self.owned:
                held[name] = _like(tensor, self.owned[name])
            elif name.endswith(COUNTER) and name.removesuffix(COUNTER) + "running_mean" in self.owned:
                held[name] = tensor.clone()
        task = Task(self.metadata, self.anatomy, transforms, held, self.head(head))
        task.metrics, task.is_compact = dict(archive.metrics), archive.format > 1
        task.description = archive.description
        return task

    def check_backbone(self) -> None:
        """Check that the backbone has the transformed weights, with these shapes, and the same head layer."""
        head = self.archive.head_layer
        for name, shape in self.archive.shapes.items():
            found = self.base.get(name)
            least = 1 if name in self.anatomy.norm_of else 2
            if not isinstance(found, nn.Parameter) or not found.is_floating_point() or found.dim() < least:
                raise WrongBackboneError(f"{self.name} transforms {name!r}, which is not a weight of the backbone")
            if found.shape != shape:
                raise WrongBackboneError(
                    f"{self.name} has {name!r} of shape {shape}, the backbone {tuple(found.shape)}"
                )
        if self.metadata.head in ("classes", "keep", "linear") and head != self.anatomy.head:
            raise WrongBackboneError(
                f"{self.name} expects {head!r} as the backbone's last layer, this one has {self.anatomy.head!r}: "
                f"pass Network(backbone, head={head!r})"
            )

    def transform(
        self, weight: Weight, before: Sequence[Transform], parts: Mapping[str, Mapping[str, Tensor]]
    ) -> Transform:
        """Return the transform of one weight, with the file's values."""
        tensor, build, given = self.base[weight.name], self.method.build, parts.get(weight.name, {})
        try:
            transform = build(weight, tensor.detach(), self.options, None, before) if build else None
        except TaskError as cause:
            raise CorruptError(f"{self.corrupt}: {cause}") from cause
        if transform is None:
            raise CorruptError(f"{self.corrupt}: method {self.method.name!r} does not transform {weight.name!r}")
        used = tensor.numel() % 8  # bits of the last byte of a mask, 0 if all
        for part, value in given.items():
            key, expected = f"{weight.name}:{part}", PART_DTYPES.get(part, torch.float32)
            if value.dtype != expected:
                raise CorruptError(f"{self.corrupt}: {key!r} is {value.dtype}, expected {expected}")
            if part in PACKED and used and int(value[-1]) >> used:
                raise CorruptError(f"{self.corrupt}: {key!r} has bits set after the last weight")
        transform.restore({part: value.to(tensor.device) for part, value in given.items()})
        return transform

    def check_owned(self) -> None:
        """Check that the task owns what its method and options say, apart from the head, and only whole norm layers."""
        base, owned, norms = self.base, self.owned, self.anatomy.norm_of
        chosen = {name for pattern in self.options.own for name in base if fnmatchcase(name, pattern)}
        plain = base.keys() - norms.keys() if self.method.owns_everything else set()
        allowed = chosen | (norms.keys() if self.options.norms else set())
        if self.method.owns_everything:
            allowed |= base.keys()  # also norm layers that are left out by Network(norms=...)
        for name, tensor in owned.items():
            if name not in base:
                raise WrongBackboneError(f"{self.name} replaces {name!r}, which the backbone does not have")
            if name not in self.head_names:
                self.check_fit(name, tensor)
                if name not in allowed or name.endswith(COUNTER):
                    raise CorruptError(f"{self.corrupt}: method {self.method.name!r} does not replace {name!r}")
        layers = {norms[name] for name in owned if name in norms and name not in chosen}
        needed = plain - set(self.head_names) | {name for name, layer in norms.items() if layer in layers}
        if missing := sorted(name for name in needed - owned.keys() if not name.endswith(COUNTER)):
            raise CorruptError(f"{self.corrupt}: {missing[0]!r} is missing")

    def check_fit(self, name: str, tensor: Tensor, outputs: int | None = None) -> None:
        model = self.base[name]
        shape = model.shape if outputs is None else (outputs, *model.shape[1:])
        if tensor.shape != shape:
            raise WrongBackboneError(
                f"{self.name} has {name!r} of shape {tuple(tensor.shape)}, the backbone needs {tuple(shape)}"
            )
        dtype = torch.float32 if isinstance(model, nn.Parameter) and model.is_floating_point() else stored_dtype(model)
        if tensor.dtype != dtype and not (tensor.dtype == torch.float32 and model.is_floating_point()):
            raise CorruptError(f"{self.corrupt}: {name!r} is {tensor.dtype}, expected {dtype}")

    def check_classes(self) -> None:
        """Check that the head has one row per class, and that a replaced last layer is complete."""
        replaced = {name: self.owned[name] for name in self.head_names if name in self.owned}
        count, kind = len(self.metadata.classes or ()), self.metadata.head
        if kind != "classes" and replaced:
            raise CorruptError(f"{self.corrupt}: it has {sorted(replaced)}, which a head of kind {kind!r} does not use")
        held = replaced if kind == "classes" else self.archive.head() if kind == "linear" else {}
        rows = {(*tensor.shape, 0 if kind == "classes" else count)[0] for tensor in held.values()}
        if odd := rows - {count}:
            raise ClassesError(f"{self.corrupt}: it lists {count} classes, but its head has {min(odd)} outputs")
        if kind == "classes":
            if not replaced or len(replaced) != len(self.head_names):
                raise CorruptError(f"{self.corrupt}: its head needs {sorted(self.head_names)}")
            for name, tensor in replaced.items():
                self.check_fit(name, tensor, count)

    def head(self, given: nn.Module | None) -> nn.Module | None:
        state, kind = self.archive.head(), self.metadata.head
        if given is not None and kind != "module":
            raise TaskError(f"{self.name} has no head module (its head is of kind {kind!r}): load it without head=...")
        if given is None and kind == "module":
            raise TaskError(f"{self.name} was saved with a head module: pass one like it, load_task(path, head=...)")
        if kind == "linear":
            given = nn.Linear(self.anatomy.features or 1, len(self.metadata.classes or ()), device="meta")
        if given is None:
            if state:
                raise CorruptError(f"{self.corrupt}: it has tensors of a head module, but head kind {kind!r}")
            return None
        model = given.state_dict()
        expected = {name: (tuple(t.shape), stored_dtype(t)) for name, t in model.items()}
        found = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        if expected != found:
            odd = min(name for name in expected | found if expected.get(name) != found.get(name))
            raise (CorruptError if kind == "linear" else TaskError)(
                f"the head module does not match {self.name}: its {odd!r} is {expected.get(odd)}, the file's "
                f"{found.get(odd)}"
            )
        device, given = self.anatomy.device, copy.deepcopy(given)  # the caller may pass the same one for another task
        given.load_state_dict({name: t.to(device, model[name].dtype) for name, t in state.items()}, assign=True)
        return given.to(device).requires_grad_(False)


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    """Move a tensor to the backbone's device and memory format, which affects the last bits, without needless copies.

    Buffers also get the backbone's dtype.
    """
    learned = isinstance(model, nn.Parameter)
    placed = tensor.to(model.device, tensor.dtype if learned else model.dtype)
    if placed.dim() > 1 and placed.shape == model.shape:
        placed = strided_like(model, placed)
    return nn.Parameter(placed, requires_grad=False) if learned else placed

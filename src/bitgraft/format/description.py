"""What a task file may say of its inputs, so that an image finds its task. `docs/format.md` specifies it.

The plain backbone's features of a task's images, l2-normalised, are taken for a mixture of Gaussians: one mean for each
class, and one covariance for all, of low rank plus noise. It is small, and it is all that routing needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from bitgraft.errors import CorruptError
from bitgraft.format.header import DESCRIPTION as PREFIX

NARROW = ("mean", "basis", "classes")  # in 16 bits


class Calibration(NamedTuple):
    """A task's scores on validation images of its own: mean and deviation, and what 95 % of them exceed."""

    route_mean: float
    route_std: float
    logit_mean: float
    logit_std: float
    threshold: float


@dataclass(frozen=True, eq=False)
class Description:
    """Features x of an image of class c: mean + basis^T (classes[c] + e) + noise, with e ~ N(0, diag(variances))."""

    mean: Tensor
    """(features)"""
    basis: Tensor
    """(rank, features), orthonormal rows."""
    classes: Tensor
    """(classes, rank): each class's mean less `mean`, in the basis."""
    variances: Tensor
    """(rank): of features about their class's mean, along the basis."""
    noise: Tensor
    """(1): the variance in every direction outside the basis."""
    calibration: Tensor
    """(5): as in `Calibration`."""

    @property
    def calibrated(self) -> Calibration:
        return Calibration(*self.calibration.tolist())

    def tensors(self) -> dict[str, Tensor]:
        """By their keys in a file."""
        return {PREFIX + field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def rounded(**tensors: Tensor) -> Description:
    """A description as its file holds it."""
    kinds = {name: torch.float16 if name in NARROW else torch.float32 for name in tensors}
    return Description(**{name: t.detach().to("cpu", kinds[name]).contiguous() for name, t in tensors.items()})


def take(tensors: dict[str, Tensor], classes: int, source: str) -> Description:
    """The description among a file's tensors, which it is taken out of. What does not fit is a `CorruptError`."""
    found = {key.removeprefix(PREFIX): tensors.pop(key) for key in list(tensors) if key.startswith(PREFIX)}
    if fault := _fault(found, classes):
        raise CorruptError(f"{source}: its description is not usable ({fault})")
    return Description(**found)


def _fault(found: Mapping[str, Tensor], classes: int) -> str:
    if found.keys() != (wanted := {field.name for field in fields(Description)}):
        return f"it has {', '.join(sorted(found)) or 'nothing'}, not {', '.join(sorted(wanted))}"
    rank, width = (*found["basis"].shape, 0, 0)[:2]
    shapes = {"mean": (width,), "basis": (rank, width), "classes": (classes, rank), "variances": (rank,)}
    shapes |= {"noise": (1,), "calibration": (len(Calibration._fields),)}
    for name, tensor in found.items():
        kind = torch.float16 if name in NARROW else torch.float32
        if tensor.dtype != kind or tensor.shape != shapes[name] or not tensor.isfinite().all():
            return f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, or has a value that is not finite"
    spread = torch.cat([found["variances"], found["noise"], found["calibration"][[1, 3]]])
    return "" if rank and width and (spread > 0).all() else "a variance is not above 0"

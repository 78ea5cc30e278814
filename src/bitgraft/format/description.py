"""A task's description of its inputs, for finding the task of an image. `docs/format.md` is the specification.

The plain backbone's l2-normalised features of the task's images are modelled by a mixture of Gaussians: one mean per
class, and a shared covariance of low rank plus isotropic noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from bitgraft.errors import CorruptError
from bitgraft.format.header import DESCRIPTION as PREFIX

HALF = ("mean", "basis", "classes")  # stored in float16, the others in float32


class Calibration(NamedTuple):
    """A task's scores on its own validation images: means, standard deviations, and the 5 % quantile."""

    route_mean: float
    route_std: float
    logit_mean: float
    logit_std: float
    threshold: float


@dataclass(frozen=True, eq=False, repr=False)
class Description:
    """Features x of an image of class c: mean + basis^T (classes[c] + e) + noise, with e ~ N(0, diag(variances))."""

    mean: Tensor
    """(features)"""
    basis: Tensor
    """(rank, features), orthonormal rows."""
    classes: Tensor
    """(classes, rank): each class mean minus `mean`, in the basis."""
    variances: Tensor
    """(rank): of features around their class mean, along the basis."""
    noise: Tensor
    """(1): the variance in every direction orthogonal to the basis."""
    calibration: Tensor
    """(5): as in `Calibration`."""

    def __repr__(self) -> str:
        classes, rank = self.classes.shape
        return f"Description(classes={classes}, rank={rank}, nbytes={self.nbytes})"

    @property
    def calibrated(self) -> Calibration:
        return Calibration(*self.calibration.tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their keys in a file."""
        return {PREFIX + field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def rounded(**tensors: Tensor) -> Description:
    """Return a description in the dtypes of a file."""
    return Description(**{name: t.detach().to("cpu", _dtype(name)).contiguous() for name, t in tensors.items()})


def take(tensors: dict[str, Tensor], classes: int, source: str) -> Description:
    """Remove the description from a file's tensors and return it. Any fault is a `CorruptError`."""
    found = {key.removeprefix(PREFIX): tensors.pop(key) for key in list(tensors) if key.startswith(PREFIX)}
    if fault := _fault(found, classes):
        raise CorruptError(f"{source} is corrupt: invalid description ({fault})")
    return Description(**found)


def _dtype(name: str) -> torch.dtype:
    return torch.float16 if name in HALF else torch.float32


def _fault(found: Mapping[str, Tensor], classes: int) -> str:
    if found.keys() != (expected := {field.name for field in fields(Description)}):
        return f"it has {', '.join(sorted(found)) or 'nothing'}, not {', '.join(sorted(expected))}"
    rank, width = (*found["basis"].shape, 0, 0)[:2]
    shapes = {"mean": (width,), "basis": (rank, width), "classes": (classes, rank), "variances": (rank,)}
    shapes |= {"noise": (1,), "calibration": (len(Calibration._fields),)}
    for name, tensor in found.items():
        if tensor.dtype != _dtype(name) or tensor.shape != shapes[name] or not tensor.isfinite().all():
            return f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, or not finite"
    spread = torch.cat([found["variances"], found["noise"], found["calibration"][[1, 3]]])
    return "" if rank and width and (spread > 0).all() else "a variance is not positive"

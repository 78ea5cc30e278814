"""Score how well an image fits each task: by the plain backbone's features, and by the task's own logits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitgraft.format.description import Calibration, Description


class Likelihood:
    """log p(x | task) of T tasks, each a mixture with one Gaussian per class, up to a constant that tasks share.

    Unlike Mahalanobis distances it includes the determinants, which make scores of different tasks comparable.
    Descriptions are padded to the same rank and number of classes, and stacked on a device.
    """

    def __init__(self, descriptions: Sequence[Description], device: torch.device | str = "cpu") -> None:
        rank, classes = (max(d.classes.shape[i] for d in descriptions) for i in (1, 0))

        def stack(tensors: list[Tensor], *shape: int, value: float = 0.0) -> Tensor:
            stacked = torch.full((len(tensors), *shape), value, dtype=torch.float32, device=device)
            for padded, tensor in zip(stacked, tensors, strict=True):
                padded[tuple(map(slice, tensor.shape))] = tensor
            return stacked

        self.width = descriptions[0].basis.shape[1]
        self.mean = stack([d.mean for d in descriptions], self.width)  # (T, features)
        self.basis = stack([d.basis for d in descriptions], rank, self.width)  # (T, rank, features)
        self.classes = stack([d.classes for d in descriptions], classes, rank)  # (T, classes, rank)
        self.variances = stack([d.variances for d in descriptions], rank, value=1.0)
        self.noise = stack([d.noise for d in descriptions], 1)[:, 0]
        self.ranks = torch.tensor([len(d.basis) for d in descriptions], device=device)
        self.counts = torch.tensor([len(d.classes) for d in descriptions], device=device)
        self._scale = self.variances.rsqrt()
        self._means = self.classes * self._scale[:, None]  # (T, classes, rank)
        absent = torch.arange(classes, device=device) >= self.counts[:, None]
        self._squares = self._means.square().sum(2).masked_fill(absent, math.inf)[:, None]  # (T, 1, classes)
        self._centre = torch.einsum("trf,tf->tr", self.basis, self.mean)
        self._lengths = self.mean.square().sum(1)

    def __call__(self, features: Tensor) -> Tensor:
        """Score features (N, features) -> (N, T); higher is better."""
        inside, outside = self.projected(features)
        volume = self.variances.log().sum(1) + (self.width - self.ranks) * self.noise.log()
        mixture = (-self.distances(inside) / 2).logsumexp(2) - self.counts.log()
        return mixture - (outside / self.noise + volume) / 2

    def projected(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return coordinates in each task's basis, (N, T, rank), and the squared length of the residual, (N, T)."""
        inside = (features @ self.basis.flatten(0, 1).T).view(-1, *self._centre.shape) - self._centre
        centred = features.square().sum(1, keepdim=True) - 2 * features @ self.mean.T + self._lengths
        return inside, (centred - inside.square().sum(2)).clamp_min(0)

    def distances(self, inside: Tensor) -> Tensor:
        """Return squared distances to class means in standard deviations, (N, T, classes), infinite where absent."""
        scaled = (inside * self._scale).transpose(0, 1)  # (T, N, rank)
        squares = scaled.square().sum(2, keepdim=True) + self._squares
        return torch.baddbmm(squares, scaled, self._means.transpose(1, 2), alpha=-2).clamp_min(0).transpose(0, 1)


def energy(logits: Tensor) -> Tensor:
    """Return log sum exp of a task's logits, which is high for images of its classes (Liu et al. 2020)."""
    return logits.float().flatten(1).logsumexp(1)


def certainty(own: Tensor, calibration: Calibration) -> Tensor:
    """Return a task's energy in standard deviations of its validation images, at most 1: outliers may exceed that."""
    return ((own - calibration.logit_mean) / calibration.logit_std).clamp_max(1.0)


def typicality(route: Tensor, own: Tensor, calibration: Calibration) -> Tensor:
    """Return how typical an image is of a task by features and logits, in deviations of its validation images."""
    return (route - calibration.route_mean) / calibration.route_std + certainty(own, calibration)

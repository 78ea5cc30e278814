"""Scorers from the literature, to compare `Likelihood` with."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bitgraft.format.description import Description
from bitgraft.runtime.identify.scorers import Likelihood


class NearestMean(Likelihood):
    """Minus the squared Euclidean distance to the nearest class mean."""

    def __init__(self, descriptions: Sequence[Description]) -> None:
        super().__init__([replace(one, variances=torch.ones_like(one.variances)) for one in descriptions])

    def __call__(self, features: Tensor) -> Tensor:
        inside, outside = self.projected(features)
        return -(self.distances(inside).amin(2) + outside)


class Mahalanobis(Likelihood):
    """Minus the squared Mahalanobis distance of normalised features to the nearest class mean (Mahalanobis++)."""

    def __call__(self, features: Tensor) -> Tensor:
        inside, outside = self.projected(features)
        return -(self.distances(inside).amin(2) + outside / self.noise)


class RelativeMahalanobis(Likelihood):
    """Mahalanobis minus the distance to one Gaussian over all classes of the task (Ren et al. 2021)."""

    def __call__(self, features: Tensor) -> Tensor:
        inside, _ = self.projected(features)
        spread = self.variances + self.classes.square().sum(1) / self.counts[:, None]
        return (inside.square() / spread).sum(2) - self.distances(inside).amin(2)

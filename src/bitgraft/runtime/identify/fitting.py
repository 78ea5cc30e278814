"""Fit a task's description to the features of its images."""

from dataclasses import replace

import torch
from torch import Tensor

from bitgraft.errors import DataError
from bitgraft.format.description import Calibration, Description, rounded
from bitgraft.runtime.identify.scorers import Likelihood, energy, typicality

RANK = 16  # principal directions; more take space and gain little
ACCEPTED = 0.95  # share of a task's own validation images to recognise
SHRINKAGE = 0.1  # of the variances towards their mean, since rare classes have few images
MIN_BUDGET = 64_000  # bytes that a description may always take
SHARE = 0.05  # of the task file that it may take, if that is more
OVERHEAD = 1_000  # bytes of float32 values and header entries


def rank_for(features: int, classes: int, file_bytes: int) -> int:
    """Return the largest rank of a description that fits the budget next to a task file of this size."""
    values = (max(MIN_BUDGET, int(SHARE * file_bytes)) - OVERHEAD) // 2 - features
    return max(1, min(RANK, values // (features + classes), features))


def fit_description(features: Tensor, labels: Tensor, classes: int, rank: int) -> Description:
    """Fit a description to features (N, features) and their labels. It is not calibrated yet."""
    present = sorted(set(labels.tolist()))
    if len(features) <= len(present):
        raise DataError(f"a description needs more images than classes: got {len(features)} of {len(present)} classes")
    features = features.double()  # with fewer images than features, LAPACK does not converge in float32
    mean = features.mean(0)
    centred = features - mean
    basis = torch.linalg.eigh(centred.T @ centred)[1][:, -rank:].T
    inside, means = centred @ basis.T, features.new_zeros(classes, len(basis))
    for label in present:
        means[label] = inside[labels == label].mean(0)
    within = inside - means[labels]
    variances, rotation = torch.linalg.eigh(within.T @ within / (len(features) - len(present)))
    variances = (1 - SHRINKAGE) * variances + SHRINKAGE * variances.mean()
    noise = (centred.square().sum() - inside.square().sum()) / (len(features) * max(1, features.shape[1] - len(basis)))
    return rounded(
        mean=mean,
        basis=rotation.T @ basis,
        classes=means @ rotation,
        variances=variances.clamp_min(1e-8),
        noise=noise.clamp_min(1e-8)[None],
        calibration=torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]),
    )


def calibrated(description: Description, features: Tensor, logits: Tensor) -> Description:
    """Return the description, calibrated by its scores on the task's own validation images."""
    route, own = Likelihood([description])(features)[:, 0], energy(logits)
    numbers = [*_moments(route), *_moments(own), 0.0]
    typical = typicality(route, own, Calibration(*numbers))
    numbers[-1] = typical.quantile(1 - ACCEPTED).item()
    return replace(description, calibration=torch.tensor(numbers))


def _moments(scores: Tensor) -> tuple[float, float]:
    return scores.mean().item(), max(scores.std().item(), 1e-6) if len(scores) > 1 else 1.0

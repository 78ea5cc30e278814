"""A task's description from the features of its images."""

import torch
from torch import Tensor

from bitgraft.errors import DataError
from bitgraft.format.description import Calibration, Description, rounded
from bitgraft.runtime.identify.scorers import Likelihood, energy, typicality

RANK = 16  # directions in which a task's features are told apart; more cost room and gain little
ACCEPTED = 0.95  # of a task's own validation images
SHRINKAGE = 0.1  # of the variances, towards their mean: rare classes have few images
ROOM = 64_000  # bytes that a description may take in any case
SHARE = 0.05  # of a task file, that it may take where that is more
OVERHEAD = 1_000  # bytes: what is not in 16 bits, and the entries of the header


def rank_for(features: int, classes: int, file_bytes: int) -> int:
    """The rank that a description may have beside a task file of this size."""
    values = (max(ROOM, int(SHARE * file_bytes)) - OVERHEAD) // 2 - features
    return max(1, min(RANK, values // (features + classes), features))


def fit_description(features: Tensor, labels: Tensor, classes: int, rank: int) -> Description:
    """The description of (N, features) and their labels, not yet calibrated."""
    present = sorted(set(labels.tolist()))
    if len(features) <= len(present):
        raise DataError(f"a description needs several images of a class, and there are {len(features)} in all")
    features = features.double()  # with fewer images than features, LAPACK does not converge in float32
    mean = features.mean(0)
    apart = features - mean
    basis = torch.linalg.eigh(apart.T @ apart)[1][:, -rank:].T
    inside, means = apart @ basis.T, features.new_zeros(classes, len(basis))
    for label in present:
        means[label] = inside[labels == label].mean(0)
    within = inside - means[labels]
    variances, turn = torch.linalg.eigh(within.T @ within / (len(features) - len(present)))
    variances = (1 - SHRINKAGE) * variances + SHRINKAGE * variances.mean()
    noise = (apart.square().sum() - inside.square().sum()) / (len(features) * max(1, features.shape[1] - len(basis)))
    return rounded(
        mean=mean,
        basis=turn.T @ basis,
        classes=means @ turn,
        variances=variances.clamp_min(1e-8),
        noise=noise.clamp_min(1e-8)[None],
        calibration=torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]),
    )


def calibrated(description: Description, features: Tensor, logits: Tensor) -> Description:
    """The same, with the means and deviations that its scores have on the task's own validation images."""
    route, own = Likelihood([description])(features)[:, 0], energy(logits)
    numbers = [*_moments(route), *_moments(own), 0.0]
    typical = typicality(route, own, Calibration(*numbers))
    numbers[-1] = typical.quantile(1 - ACCEPTED).item()
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in description.tensors().items()}
    return rounded(**{**tensors, "calibration": torch.tensor(numbers)})


def _moments(scores: Tensor) -> tuple[float, float]:
    return scores.mean().item(), max(scores.std().item(), 1e-6) if len(scores) > 1 else 1.0

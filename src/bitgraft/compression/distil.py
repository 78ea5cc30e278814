"""Calibration: a task learns to give the scores of the fine-tuned copy, without labels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from bitgraft.backbone.tracing import logits
from bitgraft.network import Network
from bitgraft.training.batches import to_device
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import ROLES, Config
from bitgraft.training.learner import Loss
from bitgraft.training.loop import fit
from bitgraft.training.presets import PAPER

CALIBRATION = PAPER.changed(
    steps=100,
    rates={"scores": 1e-4, "k": 3e-4, "k1": 3e-5, "norms": 1e-3, "weights": 1e-4, "head": 0.0},
    optimizers=dict.fromkeys(ROLES, "adam"),
    eps=1e-12,
    schedule="cosine",
    drop_after=None,
    warmup=0.1,
    statistics="kept",
)
"""Everything is near its goal already: small rates, and norm layers keep the copy's statistics."""
TEMPERATURE = 2.0


def calibrate(
    net: Network,
    name: str,
    teacher: str,
    images: Any,
    config: Config = CALIBRATION,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
) -> list[dict[str, Any]]:
    """Train all of a task but its head to give another's scores."""
    learned = list(net.tasks[name].roles())
    for role, parameter in learned:
        parameter.requires_grad_(role != "head")
    try:
        data, loss = Unlabelled(images), soft_targets(net, teacher)
        result = fit(net, name, data, None, config, loss=loss, callbacks=callbacks, workers=workers, progress=False)
        return result.history
    finally:
        for _, parameter in learned:
            parameter.requires_grad_(True)


class Unlabelled(Dataset[tuple[Tensor, Tensor]]):
    """Images as their own targets: the loss asks the teacher for its scores."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.data[index][0]
        return image, image

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)


def soft_targets(net: Network, teacher: str, temperature: float = TEMPERATURE) -> Loss:
    """The distance to the teacher's answers: KL divergence of softened scores, or squared error for features."""
    classes = net.tasks[teacher].eval().classes

    def loss(output: Any, images: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits(net(to_device(images, images.device), task=teacher)).float()
        given = logits(output).float()
        return F.mse_loss(given, wanted) if classes is None else softened(given, wanted, temperature)

    return loss


def softened(given: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(wanted / T) || softmax(given / T)), the mean over a batch (Hinton et al., 2015)."""
    ours, theirs = F.log_softmax(given / temperature, 1), F.log_softmax(wanted / temperature, 1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

"""Calibration: a task learns the scores of the fine-tuned copy by distillation, without labels."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from bitgraft.backbone.tracing import logits
from bitgraft.network import Network
from bitgraft.training.batches import call_model, to_device
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import ROLES, Config
from bitgraft.training.learner import Loss
from bitgraft.training.loop import fit
from bitgraft.training.presets import PAPER

CALIBRATION = PAPER.changed(
    steps=300,
    rates={"scores": 5e-4, "k": 3e-4, "k1": 3e-5, "norms": 1e-3, "weights": 1e-4, "head": 0.0},
    optimizers=dict.fromkeys(ROLES, "adam"),
    eps=1e-12,
    schedule="cosine",
    drop_after=None,
    warmup=0.1,
    statistics="kept",
)
"""The task starts close to the copy: rates are small, and norm layers keep the copy's statistics."""
ON_DRAWINGS = CALIBRATION.changed(rates={"scores": 1e-4})
"""Slower, or the task would fit the drawings at the expense of real images."""
TEMPERATURE = 2.0


def calibrate(
    net: Network, name: str, teacher: str, images: Any, config: Config, callbacks: Sequence[Callback], workers: int
) -> list[dict[str, Any]]:
    """Train a task, except for its head, to match another task's scores; return one record per epoch."""
    learned = list(net.tasks[name].roles())
    for role, parameter in learned:
        parameter.requires_grad_(role != "head")
    try:
        data, loss = Unlabelled(images), teacher_loss(net, teacher)
        result = fit(net, name, data, None, config, loss=loss, callbacks=callbacks, workers=workers, progress=False)
        return result.history
    finally:
        for _, parameter in learned:
            parameter.requires_grad_(True)


class Unlabelled(Dataset[tuple[Tensor, Tensor]]):
    """Images as their own targets; the loss computes the teacher's scores from them."""

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


def teacher_loss(net: Network, teacher: str) -> Loss:
    """Return the loss against a teacher: distillation of class scores, or squared error of features."""
    classes, as_logits = net.tasks[teacher].eval().classes, net.anatomy.as_logits

    def loss(output: Any, images: Tensor) -> Tensor:
        with torch.no_grad():
            output_of = partial(net, task=teacher)
            target = as_logits(logits(call_model(output_of, to_device(images, images.device), net.anatomy.dtype)))
        student = as_logits(logits(output))
        return F.mse_loss(student, target) if classes is None else distillation_loss(student, target)

    return loss


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """T² KL(softmax(teacher / T) || softmax(student / T)), the mean over a batch (Hinton et al., 2015)."""
    ours, theirs = F.log_softmax(student / temperature, 1), F.log_softmax(teacher / temperature, 1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

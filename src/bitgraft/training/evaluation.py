"""How well a task does on some data."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.training.batches import call, count, to_device
from bitgraft.training.inputs import to_evaluate
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Loader, loader


@torch.no_grad()
def measure(
    net: Network, task: str, batches: Loader, objective: Objective, accelerator: Accelerator
) -> dict[str, float]:
    """Loss and accuracy over all processes, in evaluation mode."""
    held, device = net.tasks[task], accelerator.device
    was_training = held.training
    held.eval()
    sums = torch.zeros(3, device=device)  # loss, right answers, images
    for batch in batches:
        objective.check(task, batch[1], batches.what)
        inputs, targets = to_device(batch, device)
        with accelerator.autocast():
            output = call(partial(net, task=task), inputs, objective.given(targets))
        sums[:2] += torch.stack([objective(task, output, targets).float(), objective.correct(output, targets).float()])
        sums[2] += count(inputs)
    held.train(was_training)
    loss, right, images = accelerator.reduce(sums, "sum").tolist()
    if not math.isfinite(loss):
        cause = batches.not_finite(accelerator) or "all images are, so train with lower rates"
        raise TrainingError(f"the loss on {batches.what} is not finite: {cause}")
    return {"loss": loss / images, "accuracy": right / images}


def validate(
    net: Network, loaders: Mapping[str, Loader], objective: Objective, accelerator: Accelerator
) -> dict[str, Any]:
    """What a record says of validation: the mean over the tasks that have such data, and each by itself if several."""
    scores = {name: measure(net, name, batches, objective, accelerator) for name, batches in loaders.items()}
    if not scores:
        return {}
    mean = {f"val_{what}": sum(s[what] for s in scores.values()) / len(scores) for what in ("loss", "accuracy")}
    return mean if len(scores) == 1 else {**mean, "by_task": scores}


def evaluate(
    net: Network, task: str, data: Any, *, split: str = "test", batch: int = 128, workers: int = 0
) -> dict[str, float]:
    """Loss and accuracy of a task.

    Args:
        data: a folder of images, what `open_data` gives, a Dataset of (image, label) with tensors or PIL images, or a
            DataLoader over one.
        split: of a folder, which of its images: "train", "val" or "test".
    """
    accelerator, held = Accelerator(), net._added(task)
    batches = loader(to_evaluate(held, data, split), "test", task, batch, accelerator, workers, pad=False)
    net.to(accelerator.device)
    return measure(net, task, batches, Objective([held]), accelerator)

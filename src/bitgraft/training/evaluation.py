"""Loss and accuracy of a task."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.task import evaluating
from bitgraft.training.batches import batch_size, to_device
from bitgraft.training.inputs import to_evaluate
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Loader


@torch.no_grad()
def measure(net: Network, loader: Loader, objective: Objective) -> dict[str, float]:
    """Loss and accuracy over all processes, in evaluation mode."""
    name, accelerator = loader.task, loader.accelerator
    sums = torch.zeros(3, device=accelerator.device)  # loss, correct answers, images
    with evaluating(net.tasks[name]):
        for inputs, targets in loader:
            objective.check_labels(name, targets, loader.name)
            inputs, targets = to_device((inputs, targets), accelerator.device)
            with accelerator.autocast():
                output = objective.run(partial(net, task=name), name, inputs, targets)
            loss = objective(name, output, targets, batch_size(inputs), evaluating=True)
            sums[:2] += torch.stack([loss.float(), objective.num_correct(output, targets).float()])
            sums[2] += batch_size(inputs)
    total, correct, images = accelerator.reduce(sums, "sum").tolist()
    if not math.isfinite(total):
        cause = loader.find_non_finite() or "all images are finite, so train with lower rates"
        raise TrainingError(f"the loss on {loader.name} is not finite: {cause}")
    return {"loss": total / images, "accuracy": correct / images}


def validate(net: Network, loaders: Mapping[str, Loader], objective: Objective) -> dict[str, Any]:
    """The validation part of an epoch's record: the mean over tasks and, if there are several, each task's own."""
    scores = {name: measure(net, loader, objective) for name, loader in loaders.items()}
    if not scores:
        return {}
    mean = {f"val_{metric}": sum(s[metric] for s in scores.values()) / len(scores) for metric in ("loss", "accuracy")}
    return mean if len(scores) == 1 else {**mean, "by_task": scores}


def evaluate(
    net: Network, task: str, data: Any, *, split: str = "test", seed: int = 0, batch: int = 128, workers: int = 0
) -> dict[str, float]:
    """Loss and accuracy of a task.

    Args:
        data: an image folder, the result of `open_data`, a Dataset of (image, label) with tensors or PIL images, or a
            DataLoader over one.
        split: which images of a folder: "train", "val" or "test"; without split folders, all images are "test".
        seed: the seed of training, which splits a folder without val/; with another one, val has training images.
    """
    accelerator, held = Accelerator(), net._added(task)
    loader = Loader(to_evaluate(held, data, split, seed), "test", task, batch, accelerator, workers, pad=False)
    net.to(accelerator.device)
    return measure(net, loader, Objective([held]))

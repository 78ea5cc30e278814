"""Fit the description of a task's images, which identifies the task of an image."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from bitgraft.backbone.tracing import logits
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import TaskError
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.format.description import Description
from bitgraft.network import Network
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for
from bitgraft.task import evaluating
from bitgraft.training.inputs import labelled

MAX_IMAGES = 10_000  # more would take longer without better means
BATCH = 64


@torch.no_grad()
def describe(net: Network, name: str, data: Splits | str | Path, *, workers: int = 0) -> Description:
    """Fit a task's description on training images, calibrate it on validation images, and return it.

    `identify` needs the descriptions of all tasks. Without validation images, a description is calibrated on training
    images, and then accepts too few of the task's own images.

    Args:
        data: the task's images, as `fit` takes them: a folder or the result of `open_data`.
        workers: processes that load images.
    """
    task, splits = net._added(name), data if isinstance(data, Splits) else open_data(data)
    if not task.classes:
        raise TaskError(f"task {name!r} has no classes, so its images cannot be described")
    before, task.description = task.description, None
    size = len(to_bytes(pack_task(task, net.fingerprint)))
    try:
        with evaluating(task):
            features, labels, own = _features(net, name, splits, "train", workers, run=not splits.val)
            rank = rank_for(features.shape[1], len(task.classes), size)
            fitted = fit_description(features, labels, len(task.classes), rank)
            if splits.val:
                features, _, own = _features(net, name, splits, "val", workers, run=True)
            before = found = calibrated(fitted, features, own)
    finally:  # the earlier one if it failed
        task.description = before
    return found


def _features(
    net: Network, name: str, splits: Splits, split: str, workers: int, *, run: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the backbone's features of a split, the labels and, if `run`, the task's own scores."""
    task, features, labels, own = net.tasks[name], [], [], []
    images = labelled(splits, split, task.classes or (), f"task {name!r}")
    data = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing), cache_bytes=0)
    step = -(-len(data) // MAX_IMAGES)
    sample = Subset(data, range(0, len(data), step))
    for pixels, targets in DataLoader(sample, batch_size=BATCH, num_workers=workers):
        pixels = pixels.to(net.anatomy.device, net.anatomy.dtype)
        features.append(net.features(pixels).cpu())
        labels.append(targets)
        if run:
            own.append(net.anatomy.as_logits(logits(net(pixels, task=name))).cpu())
    return torch.cat(features), torch.cat(labels), torch.cat(own) if own else Tensor()

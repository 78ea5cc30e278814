"""From a task's images to the description in its file, by which an image finds its task."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from bitgraft.backbone.tracing import logits
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import TaskError
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.format.description import Description
from bitgraft.network import Network
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for
from bitgraft.store import Store
from bitgraft.training.inputs import labelled

MOST = 10_000  # images; more make no better means, and take their time
BATCH = 64


@torch.no_grad()
def describe(net: Network, name: str, splits: Splits, *, workers: int = 0) -> Description:
    """Give a task its description: training images say what it is, validation images how its scores lie.

    Without validation images the training images serve for both, and the task then takes too few for its own.
    """
    task = net.tasks[name]
    if not task.classes:
        raise TaskError(f"task {name!r} has no classes, so there is nothing to describe its images by")
    task.description = None
    size, was_training = len(to_bytes(pack_task(task, net.fingerprint))), task.training
    task.eval()
    try:
        features, labels, own = _seen(net, name, splits, "train", workers, run=not splits.val)
        found = fit_description(
            features, labels, len(task.classes), rank_for(features.shape[1], len(task.classes), size)
        )
        if splits.val:
            features, _, own = _seen(net, name, splits, "val", workers, run=True)
        task.description = calibrated(found, features, own)
    finally:
        task.train(was_training)
    return task.description


def describe_in_store(store: Store, net: Network, name: str, splits: Splits, *, workers: int = 0) -> tuple[Path, int]:
    """Describe a task of a store and write its file again; the path, and the bytes that the description takes."""
    store.load(net, name)
    taken = describe(net, name, splits, workers=workers).nbytes
    net.save_task(name, store.path(name))
    return store.path(name), taken


def _seen(
    net: Network, name: str, splits: Splits, split: str, workers: int, *, run: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain features, labels and, if it is to run, the task's own scores of the images of a split."""
    task, features, labels, own = net.tasks[name], [], [], []
    images = labelled(splits, split, task.classes or (), f"task {name!r}")
    data = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing), cache_bytes=0)
    for pixels, targets in _batches(data, workers):
        pixels = pixels.to(net.anatomy.device)
        features.append(net.features(pixels).cpu())
        labels.append(targets)
        if run:
            own.append(logits(net(pixels, task=name)).float().cpu())
    return torch.cat(features), torch.cat(labels), torch.cat(own) if own else Tensor()


def _batches(data: ImageDataset, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All images, or as many of them as are needed, at even distances."""
    step = -(-len(data) // MOST)
    yield from DataLoader(Subset(data, range(0, len(data), step)), batch_size=BATCH, num_workers=workers)

"""Describe the images of tasks; find the task of each image and its answers, or "unknown"."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import Picture
from bitgraft.data.images import Images, Splits
from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.data.splits import open_data
from bitgraft.errors import TaskError
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.format.description import Description
from bitgraft.network import Network
from bitgraft.runtime.identify.decision import Identified, described, union_scores
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for
from bitgraft.task import evaluating
from bitgraft.workflows.prediction import ONE, best, preprocessing_of, torch_scores

BATCH = 16
DESCRIBED = 64  # images per batch for a description
MAX_DESCRIBED = 10_000  # more images would take longer without better means
Prepared = Mapping[Preprocessing, Tensor]
"""One image, as a tensor for each preprocessing that tasks use."""


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
    images = splits.labelled(split, task.classes or (), f"task {name!r}")
    data = ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing), cache_bytes=0)
    step = -(-len(data) // MAX_DESCRIBED)
    sample = Subset(data, range(0, len(data), step))
    for pixels, targets in DataLoader(sample, batch_size=DESCRIBED, num_workers=workers):
        features.append(net.features(pixels.to(net.anatomy.device, net.anatomy.dtype)).cpu())
        labels.append(targets)
        if run:
            own.append(net.anatomy.as_logits(torch_scores(net, name, pixels)))
    return torch.cat(features), torch.cat(labels), torch.cat(own) if own else Tensor()


def identify(
    net: Network, images: Picture | Iterable[Picture], *, top: int = 5, tasks: int = 3
) -> dict[str, Any] | list[dict[str, Any]]:
    """Find the task of one image, or of each of several, and the task's likeliest classes.

        identify(net, "rose.jpg")   # {"task": "flowers", "route": [...], "answers": [{"class": "rose", ...}, ...]}

    The task is None for an image that resembles no task. Tasks need a description of their images, which
    `bitgraft train` adds; in Python, `describe` does.

    Args:
        images: files, bytes of files, PIL images or arrays (H, W, C), as for `predict`.
        top: number of classes.
        tasks: number of tasks in `route`, the likeliest ones with their scores.
    """
    found = list[dict[str, Any]]()
    pictures: list[Picture] = [images] if isinstance(images, ONE) else list(images)
    with evaluating(*net.tasks.values()):
        for start in range(0, len(pictures), BATCH):
            batch = [prepare(net, picture) for picture in pictures[start : start + BATCH]]
            found += find(net, batch, top=top, tasks=tasks)
    return found[0] if isinstance(images, ONE) else found


def preprocessings(net: Network) -> dict[str, Preprocessing]:
    """Return the preprocessing of each task with a description."""
    return {name: preprocessing_of(net, name) for name in described(net.tasks)}


def prepare(net: Network, picture: Picture) -> Prepared:
    """Preprocess an image in every way that the network's tasks need."""
    return {one: evaluation_tensor(picture, one) for one in dict.fromkeys(preprocessings(net).values())}


def find(net: Network, images: Sequence[Prepared], *, top: int = 5, tasks: int = 3) -> list[dict[str, Any]]:
    """Return each image's task (None if unknown), its `tasks` likeliest tasks with scores, and its `top` classes.

    {"task": "flowers", "route": [{"task": "flowers", "score": 0.98}, ...], "answers": [{"class": "rose", ...}, ...]}
    """
    decided = _decided(net, {one: torch.stack([image[one] for image in images]) for one in images[0]})
    return as_answers(decided, {name: task.classes for name, task in net.tasks.items()}, top=top, tasks=tasks)


def _decided(net: Network, batches: Mapping[Preprocessing, Tensor]) -> Identified:
    """Identify the images of a batch, which is given once for each preprocessing."""
    cast = {one: pixels.to(net.anatomy.device, net.anatomy.dtype) for one, pixels in batches.items()}
    return net.identify({name: cast[one] for name, one in preprocessings(net).items()})


def as_answers(
    decided: Identified, classes: Mapping[str, Sequence[str] | None], *, top: int = 5, tasks: int = 3
) -> list[dict[str, Any]]:
    """Convert what the network identified to the result of `find`."""
    answers: list[list[dict[str, Any]]] = [[] for _ in decided.tasks]
    for name, (rows, output) in decided.outputs.items():
        for row, one in zip(rows, output.cpu().softmax(1), strict=True):
            if decided.likeliest[row] == name:
                answers[row] = best(one, classes[name], top)
    routes = [
        [{"task": a["class"], "score": a["probability"]} for a in best(row, decided.names, tasks)]
        for row in decided.scores.cpu()
    ]
    return [
        {"task": task, "route": route, "answers": known if task is not None else []}
        for task, route, known in zip(decided.tasks, routes, answers, strict=True)
    ]


def evaluate_union(net: Network, task: str, images: Images, *, batch: int = 128, workers: int = 0) -> dict[str, float]:
    """Return the accuracy on a task's images over the classes of all tasks, and with the task given.

    `unknown` is the share of images that no task accepts; they count with their likeliest class.
    """
    if net.tasks[task].description is None:
        raise TaskError(f"task {task!r} has no description of its images: add one with `bitgraft describe {task} DATA`")
    wanted, sums = preprocessings(net), torch.zeros(4)
    parts = list(dict.fromkeys(wanted.values()))
    first = [name for name, _ in net.classes()].index(task)
    loaders = [DataLoader(ImageDataset(images, one), batch_size=batch, num_workers=workers) for one in parts]
    for batches in zip(*loaders, strict=True):
        labels = batches[0][1]
        pixels = {one: given for one, (given, _) in zip(parts, batches, strict=True)}
        decided, task_scores = _decided(net, pixels), torch_scores(net, task, pixels[wanted[task]])
        sums += torch.tensor(
            [
                (union_scores(decided, net.tasks).argmax(1).cpu() == first + labels).sum(),
                (task_scores.argmax(1) == labels).sum(),
                sum(name == task for name in decided.likeliest),
                (decided.margins < 0).sum(),
            ]
        )
    keys = ("accuracy", "told_accuracy", "task_accuracy", "unknown")
    return {"tasks": len(wanted), **dict(zip(keys, (sums / len(images)).tolist(), strict=True))}

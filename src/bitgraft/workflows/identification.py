"""From images whose task nobody names to a task and its answers, or to "unknown"."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.decode import Picture
from bitgraft.data.images import Images
from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import TaskError
from bitgraft.network import Network
from bitgraft.runtime.identify.decision import Decision, described, union_scores
from bitgraft.workflows.prediction import best, preprocessing_of, probabilities, torch_scores

Prepared = Mapping[Preprocessing, Tensor]
"""One image as tasks take it."""


def ways(net: Network) -> dict[str, Preprocessing]:
    """How each task with a description prepares images."""
    return {name: preprocessing_of(net, name) for name in described(net.tasks)}


def prepare(net: Network, picture: Picture) -> Prepared:
    """An image in each of the ways that the network's tasks prepare it."""
    return {way: evaluation_tensor(picture, way) for way in dict.fromkeys(ways(net).values())}


def decide(net: Network, images: Sequence[Prepared]) -> Decision:
    """The tasks of images, run together."""
    wanted, device = ways(net), net.anatomy.device
    stacked = {way: torch.stack([image[way] for image in images]).to(device) for way in dict.fromkeys(wanted.values())}
    return net.decide({name: stacked[way] for name, way in wanted.items()})


def find(net: Network, images: Sequence[Prepared], *, top: int = 5, tasks: int = 3) -> list[dict[str, Any]]:
    """For each image: its task (None if unknown), the likeliest `tasks` and their scores, and its answers.

    {"task": "flowers", "route": [{"task": "flowers", "score": 0.98}, ...], "answers": [{"class": "rose", ...}, ...]}
    """
    return told(decide(net, images), {name: task.classes for name, task in net.tasks.items()}, top=top, tasks=tasks)


def told(
    decision: Decision, classes: Mapping[str, Sequence[str] | None], *, top: int = 5, tasks: int = 3
) -> list[dict[str, Any]]:
    """A decision as `find` tells it."""
    found, scores, names = decision.identified.tasks, decision.identified.scores, decision.identified.names
    answers: list[list[dict[str, Any]]] = [[] for _ in found]
    for name, (rows, output) in decision.outputs.items():
        for row, one in zip(rows, probabilities(output.cpu()), strict=True):
            if decision.best[row] == name:
                answers[row] = best(one, classes[name], top)
    routes = [
        [{"task": a["class"], "score": a["probability"]} for a in best(row, names, tasks)] for row in scores.cpu()
    ]
    return [
        {"task": task, "route": route, "answers": known if task is not None else []}
        for task, route, known in zip(found, routes, answers, strict=True)
    ]


def evaluate_union(net: Network, task: str, images: Images, *, batch: int = 128, workers: int = 0) -> dict[str, float]:
    """Accuracy on a task's images where nobody says which task it is, beside the accuracy if somebody does.

    An image that is called unknown still counts by its likeliest class; `unknown` says how many there are.
    """
    if net.tasks[task].description is None:
        raise TaskError(
            f"task {task!r} has no description of its inputs: make one with `bitgraft describe {task} DATA`"
        )
    wanted, classes = ways(net), net.classes()
    parts = {way: ImageDataset(images, way) for way in dict.fromkeys(wanted.values())}
    first, sums = classes.index((task, str((net.tasks[task].classes or ())[0]))), torch.zeros(4)
    loaders = [DataLoader(data, batch_size=batch, num_workers=workers) for data in parts.values()]
    for batches in zip(*loaders, strict=True):
        labels = batches[0][1]
        stacked = dict(zip(parts, (pixels.to(net.anatomy.device) for pixels, _ in batches), strict=True))
        decision = net.decide({name: stacked[way] for name, way in wanted.items()})
        told = torch_scores(net, task, stacked[wanted[task]])
        sums += torch.tensor(
            [
                (union_scores(decision, net.tasks).argmax(1).cpu() == first + labels).sum(),
                (told.argmax(1) == labels).sum(),
                sum(name == task for name in decision.best),
                (decision.identified.margins < 0).sum(),
            ]
        )
    keys = ("accuracy", "told_accuracy", "task_accuracy", "unknown")
    return {"tasks": len(wanted), **dict(zip(keys, (sums / len(images)).tolist(), strict=True))}

"""What a process trains: tasks and nothing else, so that only what they learn is reduced between processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.backbone.tracing import logits
from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training import cpu

Loss = Callable[[Any, Any], Tensor]
"""(what the network gives, what the data says) -> the mean loss of a batch."""


class Learner(nn.Module):
    """What learns as the only children; the network is held out of sight of whoever collects parameters."""

    def __init__(self, net: Network, learned: Iterable[nn.Module]) -> None:
        super().__init__()
        self.learned = nn.ModuleList(learned)
        self._net = (net,)

    def forward(self, images: Tensor, task: str) -> Any:
        task_module = self._net[0].ready(task)
        with cpu.fast_convolutions(images.device):
            return task_module(images)


class Objective:
    """Cross entropy with its usual options, or a loss of the user's own; always the sum over a batch."""

    def __init__(self, tasks: Iterable[Task], loss: Loss | None = None, label_smoothing: float = 0.0) -> None:
        self.loss, self.label_smoothing = loss, label_smoothing
        self.outputs = {task.name: len(task.classes) if task.classes is not None else None for task in tasks}
        self.weights: dict[str, Tensor | None] = dict.fromkeys(self.outputs)

    def weigh(
        self, task: str, weights: Literal["balanced"] | tuple[float, ...], data: Any, device: torch.device
    ) -> None:
        """Give each class its weight: those stated, or the inverse of how often it comes."""
        if weights == "balanced":
            labels, outputs = getattr(data, "labels", None), self.outputs[task]
            if labels is None or outputs is None:
                raise TrainingError("class_weights='balanced' needs a data set with a list `labels`: give the weights")
            self.weights[task] = balanced(torch.as_tensor(labels), outputs).to(device)
        else:
            self.weights[task] = torch.tensor(weights, device=device)

    def __call__(self, task: str, output: Any, target: Any) -> Tensor:
        if self.loss is not None:
            return self.loss(output, target) * len(target)
        scores = logits(output)
        return F.cross_entropy(
            scores.float(), target, self.weights[task], label_smoothing=self.label_smoothing, reduction="sum"
        )

    def correct(self, output: Any, target: Any) -> Tensor:
        """How many answers are right; none are where the loss is the user's own."""
        if self.loss is not None:
            return torch.zeros((), device=target.device)
        right: Tensor = (logits(output).argmax(1) == target).sum()
        return right

    def checked(self, task: str, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Any]]:
        """Batches to train a task on, each looked at before it is used."""
        for images, targets in batches:
            self.check(task, targets, f"the training data of task {task!r}")
            yield images, targets

    def check(self, task: str, target: Any, where: str) -> None:
        """Refuse labels that the head has no output for, while they are still on the CPU."""
        outputs = self.outputs[task]
        if self.loss is not None or outputs is None or not isinstance(target, Tensor) or not target.numel():
            return
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= outputs:
            label = low if low < 0 else high
            raise TrainingError(
                f"{where} has the label {label}, but task {task!r} has {outputs} classes, numbered from 0: "
                "add the task with as many classes as the data has"
            )


def balanced(labels: Tensor, classes: int) -> Tensor:
    """Weights inverse to how often a class comes, with mean one over the images."""
    counts = torch.bincount(labels, minlength=classes).clamp(min=1)
    return labels.numel() / (classes * counts.float())


def trainable(net: Network, name: str) -> Task:
    """The task of that name, if there is something in it to learn."""
    task = net.tasks.get(name)
    if task is None:
        raise TrainingError(f"there is no task {name!r} to train: add it first, net.add_task({name!r}, classes=...)")
    if not any(True for _ in task.roles()):
        raise TrainingError(
            f"task {name!r} is frozen (it was loaded from a file, or has been trained): add it anew to train it"
        )
    return task

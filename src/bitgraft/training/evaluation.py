"""Data as the loop takes it, and how well a task does on some."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from bitgraft.network import Network
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Batches
from bitgraft.training.to_device import to_device


class Loader:
    """A data set in batches, from any step of any epoch on."""

    def __init__(self, data: Any, batches: Batches, workers: int, pin: bool) -> None:
        self.data, self.batches = data, batches
        self._loader: DataLoader[Any] = DataLoader(
            data, batch_sampler=batches, num_workers=workers, pin_memory=pin, generator=torch.Generator()
        )  # with a generator of its own: it draws a number for each pass, which must not move the network's randomness

    def from_step(self, epoch: int, step: int) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self.batches.at(epoch, step)
        return iter(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self.from_step(0, 0)

    def plain(self) -> Iterator[Any]:
        """Every image once, in order and without augmentation, in every process."""
        data = self.data.without_augmentation() if hasattr(self.data, "without_augmentation") else self.data
        workers, rng = self._loader.num_workers, torch.Generator()
        return iter(DataLoader(data, batch_size=4 * self.batches.size, num_workers=workers, generator=rng))


@torch.no_grad()
def evaluate(
    net: Network, task: str, loader: Loader, objective: Objective, accelerator: Accelerator
) -> dict[str, float]:
    """Loss and accuracy over all processes, in evaluation mode."""
    held = net.tasks[task]
    was_training = held.training
    held.eval()
    sums = torch.zeros(3, device=accelerator.device)
    for images, targets in loader:
        if not len(images):
            continue
        objective.check(task, targets, "the validation data")
        images, targets = to_device(images, accelerator.device), targets.to(accelerator.device)
        with accelerator.autocast():
            output = net(images, task=task)
        loss = objective(task, output, targets)
        right = objective.correct(output, targets)
        sums += torch.stack([loss.float(), right.float(), right.new_tensor(len(images)).float()])
    held.train(was_training)
    loss_sum, right_sum, count = accelerator.reduce(sums, "sum").tolist()
    return {"loss": loss_sum / count, "accuracy": right_sum / count}


def validate(
    net: Network, loaders: Mapping[str, Loader], objective: Objective, accelerator: Accelerator
) -> dict[str, Any]:
    """What a record says of validation: the mean over the tasks that have such data, and each by itself if several."""
    scores = {name: evaluate(net, name, loader, objective, accelerator) for name, loader in loaders.items()}
    if not scores:
        return {}
    mean = {f"val_{what}": sum(s[what] for s in scores.values()) / len(scores) for what in ("loss", "accuracy")}
    return mean if len(scores) == 1 else {**mean, "by_task": scores}


def score(net: Network, task: str, data: Any, *, batch: int = 128, workers: int = 0) -> dict[str, float]:
    """Loss and accuracy of a task on a Dataset of (image, label)."""
    objective = Objective([net.tasks[task]])
    accelerator = Accelerator()
    share = Batches(len(data), batch, None, accelerator.process_index, accelerator.num_processes)
    net.to(accelerator.device)
    return evaluate(net, task, Loader(data, share, workers, accelerator.device.type == "cuda"), objective, accelerator)

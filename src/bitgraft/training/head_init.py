"""What a task starts from: its norm layers' statistics settled on the data, its head fitted on cached features, and
the means that changes of its weights are levelled by.

They take seconds and save epochs. Statistics come first: a head that was fitted to features normalised by the
backbone's statistics is of no use once the task's own batches do the normalising.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.network import Network
from bitgraft.runtime.task_module import TaskModule
from bitgraft.training.config import Config
from bitgraft.training.evaluation import Loader
from bitgraft.training.learner import Objective
from bitgraft.training.mean_shift_correction import Inputs, levelled
from bitgraft.training.sync_bn import over_processes
from bitgraft.training.to_device import to_device

Batch = tuple[Tensor, Tensor]
STEPS = 300
DECAY = 1e-4


def begin(
    net: Network, name: str, loader: Loader, objective: Objective, config: Config, accelerator: Accelerator
) -> None:
    """What the configuration asks for before a task's first step."""
    level = config.mean_shift_correction and config.statistics == "kept"
    if config.head_init:
        with over_processes(accelerator.num_processes):
            settle_statistics(net, name, loader, accelerator.device)
    if config.head_init or level:
        images = objective.checked(name, loader.plain())
        seen = look(net, name, images, accelerator.device, head=config.head_init, means=level)
        fit_head(net, name, seen)
        net.tasks[name].correct_mean_shift(seen.means)


@torch.no_grad()
def settle_statistics(net: Network, name: str, batches: Iterable[Batch], device: torch.device) -> None:
    """Make the running statistics that the task owns the mean over one pass of training batches."""
    task = net.tasks[name].train()
    task_module = TaskModule(task)
    task_module.refresh()
    layers: list[Any] = [m for m in task_module.module.modules() if getattr(m, "running_mean", None) is not None]
    moving = [layer for layer in layers if layer.training]
    if not moving:
        return
    for layer in moving:  # of this task_module alone, which is thrown away
        layer.momentum = None
        layer.num_batches_tracked.zero_()
    for images, _ in batches:
        task_module(to_device(images, device))


@dataclass
class Look:
    """What one pass over the training images shows of a task as it starts."""

    features: list[Tensor] = field(default_factory=list)
    """What the head takes in."""
    labels: list[Tensor] = field(default_factory=list)
    means: dict[str, Tensor] = field(default_factory=dict)
    """What each weight takes in, the mean over images and pixels, for weights that feed a norm layer of the task's."""


@torch.no_grad()
def look(
    net: Network, name: str, batches: Iterable[Batch], device: torch.device, *, head: bool = False, means: bool = False
) -> Look:
    """Run every image through the task as it is, in evaluation mode, for its head to be fitted, for means, or both."""
    task = net.tasks[name].eval()
    task_module = TaskModule(task)
    task_module.refresh()
    seen, hooks = Look(), []
    if head := head and len(net.anatomy.heads) < 2 and task.metadata.head in ("classes", "linear"):
        layer = task.head if task.head is not None else task_module.module.get_submodule(net.anatomy.heads[0])
        hooks.append(layer.register_forward_pre_hook(lambda layer, args: seen.features.append(args[0])))
    inputs = Inputs({id(task_module.module.get_parameter(name)): name for name in levelled(task)} if means else {})
    try:
        for images, targets in batches:
            with inputs:
                task_module(to_device(images, device))
            if head:
                seen.labels.append(targets.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    seen.means = inputs.means()
    return seen


def fit_head(net: Network, name: str, seen: Look) -> bool:
    """Minimise the head's cross entropy over all of the data at once. False where the head is not a linear one."""
    if not seen.features:
        return False
    features = torch.cat(seen.features)
    features = features.flatten(1) if _is_pixel(features) else features
    if features.dim() != 2:
        return False
    weight, bias = _head_parameters(net, name)
    _minimise(features.float(), torch.cat(seen.labels), weight, bias)
    return True


def _head_parameters(net: Network, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    task = net.tasks[name]
    if task.head is not None:
        held: dict[str, Any] = dict(task.head.named_parameters())
        return held["weight"], held.get("bias")
    owned: dict[str, Any] = task.owned
    return owned[f"{net.anatomy.heads[0]}.weight"], owned.get(f"{net.anatomy.heads[0]}.bias")


def _is_pixel(features: Tensor) -> bool:
    """Features of a head that is a 1x1 convolution on a map of one pixel."""
    return features.dim() > 2 and features[0, 0].numel() == 1


def _minimise(features: Tensor, labels: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Adam on standardised features, then the scale and shift folded back into the head."""
    mean, std = features.mean(0), features.std(0, correction=0).clamp(min=1e-4)
    inputs = (features - mean) / std
    w = torch.zeros(weight.shape[0], inputs.shape[1], device=inputs.device, requires_grad=True)
    b = torch.zeros(weight.shape[0], device=inputs.device, requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=1e-2)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(inputs, w, b), labels) + DECAY * w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        folded = w / std
        weight.copy_(folded.view_as(weight))
        if bias is not None:
            bias.copy_(b - folded @ mean)

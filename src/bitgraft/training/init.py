"""What a task starts from: norm statistics of its own data, a head fitted on cached features, and the means that
changes of its weights are corrected by.

They take seconds and save epochs. Statistics come first: a head that was fitted to features normalised by the
backbone's statistics is of no use once the task's own batches do the normalising. Each process runs its share of the
images; all of them end with the same task.
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
from bitgraft.training.batches import call, to_device
from bitgraft.training.config import Config
from bitgraft.training.inputs import check_labels
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Batches, Part, loader
from bitgraft.training.mean_shift_correction import Inputs, levelled
from bitgraft.training.processes import broadcast_from_main, from_main, gathered_in_main
from bitgraft.training.sync_bn import over_processes

STEPS = 300
DECAY = 3e-3  # on standardised features: less lets the head learn its few images by heart
ON_DEVICE = 1 << 30  # bytes of features up to which the head is fitted on the device; more stay on the CPU


def begin(
    net: Network, name: str, data: Any, objective: Objective, config: Config, accelerator: Accelerator, workers: int
) -> None:
    """Run what the configuration asks for before a task's first step."""
    task, device = net.tasks[name], accelerator.device
    broadcast_from_main(task, accelerator)
    if config.head_init:
        batches = loader(data, "training", name, config.batch, accelerator, workers, config.seed, smallest=2)
        shares = ((inputs, objective.given(t), parts[0]) for (inputs, t), parts in batches.from_step(0, 0))
        settle_statistics(net, name, shares, accelerator)
    level = config.mean_shift_correction and config.statistics == "kept"
    if config.head_init or level:
        plain = data.without_augmentation() if hasattr(data, "without_augmentation") else data
        in_order = loader(plain, "training", name, 4 * config.batch, accelerator, workers, pad=False)
        seen = look(net, name, in_order, device, head=config.head_init, means=level)
        for labels in seen.labels:
            objective.check(name, labels, in_order.what)
        if looks := gathered_in_main(seen, accelerator):
            seen = _merged(looks, in_order.batches)
            if seen.labels and objective.loss is None and seen.labels[0].dim() == 1:
                check_labels(task, torch.cat(seen.labels).tolist())
            fit_head(net, name, seen, device)
        means = from_main(seen.means, accelerator)
        task.correct_mean_shift({weight: mean.to(device) for weight, mean in means.items()})
    broadcast_from_main(task, accelerator)


@torch.no_grad()
def settle_statistics(
    net: Network, name: str, batches: Iterable[tuple[Any, Any, Part]], accelerator: Accelerator
) -> None:
    """Make the running statistics that the task owns the mean over one pass of training batches."""
    task = net.tasks[name].train()
    task_module = TaskModule(task)
    task_module.refresh()
    layers: list[Any] = [m for m in task_module.module.modules() if getattr(m, "running_mean", None) is not None]
    moving = [layer for layer in layers if layer.training]
    if not moving:
        return
    for layer in moving:  # of this module alone, which is thrown away
        layer.momentum = None
        layer.num_batches_tracked.zero_()
    for inputs, targets, part in batches:
        with over_processes(accelerator.num_processes, count=part.own > 0):
            call(task_module, *to_device((inputs, targets), accelerator.device))


@dataclass
class Look:
    """What one pass over the training images shows of a task as it starts."""

    features: list[Tensor] = field(default_factory=list)
    """What the head takes in, on the CPU."""
    labels: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """What each weight that feeds a norm layer of the task's takes in, summed over images and pixels."""
    pixels: dict[str, int] = field(default_factory=dict)

    def take(self, features: Tensor) -> None:
        """Keep what a linear head can be fitted on, one vector for each image."""
        if features.dim() == 2 or _is_pixel(features):
            self.features.append(features.cpu())

    @property
    def means(self) -> dict[str, Tensor]:
        """For each such weight a tensor that broadcasts against it."""
        return {name: total / self.pixels[name] for name, total in self.sums.items()}


@torch.no_grad()
def look(
    net: Network,
    name: str,
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    *,
    head: bool = False,
    means: bool = False,
) -> Look:
    """Run every image through the task as it is, in evaluation mode, for its head to be fitted, for means, or both."""
    task = net.tasks[name].eval()
    task_module = TaskModule(task)
    task_module.refresh()
    seen, hooks = Look(), []
    if head := head and len(net.anatomy.heads) < 2 and task.metadata.head in ("classes", "linear"):
        layer = task.head if task.head is not None else task_module.module.get_submodule(net.anatomy.heads[0])
        hooks.append(layer.register_forward_pre_hook(lambda layer, args: seen.take(args[0])))
    inputs = Inputs({id(task_module.module.get_parameter(name)): name for name in levelled(task)} if means else {})
    try:
        for images, targets in batches:
            with inputs:
                call(task_module, to_device(images, device))
            if head and isinstance(targets, Tensor):
                seen.labels.append(targets)
    finally:
        for hook in hooks:
            hook.remove()
    seen.sums, seen.pixels = {name: total.cpu() for name, total in inputs.sums.items()}, inputs.pixels
    return seen


def _merged(looks: list[Look], batches: Batches) -> Look:
    """What all processes saw of these batches, as if one had."""
    if len(looks) == 1:
        return looks[0]
    merged = Look()
    for seen in looks:
        for name, total in seen.sums.items():
            merged.sums[name] = merged.sums[name] + total if name in merged.sums else total
            merged.pixels[name] = merged.pixels.get(name, 0) + seen.pixels[name]
    order = torch.tensor([index for rank in range(len(looks)) for share in batches.of(rank) for index in share])
    for kind in ("features", "labels"):
        if rows := [batch for seen in looks for batch in getattr(seen, kind)]:
            getattr(merged, kind).append(torch.cat(rows)[order.argsort()])
    return merged


def fit_head(net: Network, name: str, seen: Look, device: torch.device) -> None:
    """Minimise a linear head's cross entropy over all of the data at once."""
    if not seen.features:
        return
    features, labels = torch.cat(seen.features), torch.cat(seen.labels)
    features = features.flatten(1) if _is_pixel(features) else features
    if features.dim() == 2:
        weight, bias = _head_parameters(net, name)
        place = device if features.nbytes <= ON_DEVICE else features.device
        _minimise(features.to(place).float(), labels.to(place), weight, bias)


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

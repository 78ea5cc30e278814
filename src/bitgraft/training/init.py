"""Initialise a task from its data: norm statistics, a head fitted on cached features, input means.

This takes seconds and saves epochs. Statistics come first, because a head fitted to features normalised by the
backbone's statistics is useless once the task's own are used; kept statistics stay the backbone's. Each process runs
its shard of the images; all end with the same task.
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
from bitgraft.training.batches import call_model, to_device, to_dtype
from bitgraft.training.config import Config
from bitgraft.training.inputs import check_several_classes
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Loader, MicroBatch
from bitgraft.training.mean_shift_correction import InputSums, corrected_weights
from bitgraft.training.processes import broadcast_from_main, from_main, gathered_in_main
from bitgraft.training.sync_bn import over_processes

STEPS = 300
DECAY = 3e-3  # on features of unit scale; with less the head overfits
ON_DEVICE = 1 << 30  # bytes of features up to which the head is fitted on the device instead of the CPU


def initialize(
    net: Network, name: str, train_loader: Loader, objective: Objective, config: Config, accelerator: Accelerator
) -> None:
    """Prepare a task for its first step, as the configuration says."""
    task, device = net.tasks[name], accelerator.device
    data, workers = train_loader.data, train_loader.workers
    broadcast_from_main(task, accelerator)
    if config.head_init:
        shuffled = Loader(data, "training", name, config.batch, accelerator, workers, config.seed, min_size=2)
        batches = shuffled.from_step(0, 0)
        shards = ((inputs, objective.forward_targets(targets), micro[0]) for (inputs, targets), micro in batches)
        reset_statistics(net, name, shards, accelerator)
    correct_means = config.mean_shift_correction and config.statistics == "kept"
    if config.head_init or correct_means:
        plain = data.without_augmentation() if hasattr(data, "without_augmentation") else data
        in_order = Loader(plain, "training", name, 4 * config.batch, accelerator, workers, pad=False)
        observed = observe(net, name, in_order, device, head=config.head_init, means=correct_means)
        for labels in observed.labels:
            objective.check_labels(name, labels, in_order.name)
        observed.indices = [index for shard in in_order.batches for index in shard]
        if shards_observed := gathered_in_main(observed, accelerator):
            observed = _merged(shards_observed)
            if observed.labels and objective.loss is None and observed.labels[0].dim() == 1:
                check_several_classes(task, torch.cat(observed.labels).tolist())
            fit_head(net, name, observed, device, config.label_smoothing)
        means = from_main(observed.means, accelerator)
        task.correct_mean_shift({weight: mean.to(device) for weight, mean in means.items()})
    broadcast_from_main(task, accelerator)


@torch.no_grad()
def reset_statistics(
    net: Network, name: str, batches: Iterable[tuple[Any, Any, MicroBatch]], accelerator: Accelerator
) -> None:
    """Set the statistics that training updates to the mean over one pass of (inputs, targets, micro-batch)."""
    task_module = TaskModule(net.tasks[name].train())
    task_module.refresh()
    layers: list[Any] = [m for m in task_module.module.modules() if getattr(m, "num_batches_tracked", None) is not None]
    layers = [layer for layer in layers if layer.training]
    if not layers:
        return
    for layer in layers:  # of this temporary module only
        layer.momentum = None  # a cumulative average
        layer.num_batches_tracked.zero_()
    for inputs, targets, micro in batches:
        with over_processes(accelerator.num_processes, count=micro.local_size > 0):
            inputs, targets = to_device((inputs, targets), accelerator.device)
            call_model(task_module, to_dtype(inputs, net.anatomy.dtype), targets)


@dataclass
class Observed:
    """What one pass over the training images collects."""

    features: list[Tensor] = field(default_factory=list)
    """Inputs of the head, on the CPU."""
    labels: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of each corrected weight, summed over images and pixels."""
    pixels: dict[str, int] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    """The images, in order."""

    def add_features(self, features: Tensor) -> None:
        """Keep features that a linear head can be fitted on, one vector per image."""
        if features.dim() == 2 or _is_pixel(features):
            self.features.append(features.cpu())

    @property
    def means(self) -> dict[str, Tensor]:
        """For each corrected weight, its mean input; it broadcasts against the weight."""
        return {name: total / self.pixels[name] for name, total in self.sums.items()}


@torch.no_grad()
def observe(
    net: Network,
    name: str,
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    *,
    head: bool = False,
    means: bool = False,
) -> Observed:
    """Run all images in evaluation mode and collect the head's inputs and labels, input means, or both."""
    task = net.tasks[name].eval()
    task_module = TaskModule(task)
    task_module.refresh()
    observed, hooks = Observed(), []
    if head := head and len(net.anatomy.heads) < 2 and task.metadata.head in ("classes", "linear"):
        layer = task.head if task.head is not None else task_module.module.get_submodule(net.anatomy.heads[0])
        hooks.append(layer.register_forward_pre_hook(lambda layer, args: observed.add_features(args[0])))
    weights = corrected_weights(task) if means else []
    inputs = InputSums({id(task_module.module.get_parameter(weight)): weight for weight in weights})
    try:
        for images, targets in batches:
            with inputs:
                call_model(task_module, to_dtype(to_device(images, device), net.anatomy.dtype))
            if head and isinstance(targets, Tensor):
                observed.labels.append(targets)
    finally:
        for hook in hooks:
            hook.remove()
    observed.sums, observed.pixels = {weight: total.cpu() for weight, total in inputs.sums.items()}, inputs.pixels
    return observed


def _merged(shards: list[Observed]) -> Observed:
    """What all processes observed, in the order of one process."""
    if len(shards) == 1:
        return shards[0]
    merged = Observed()
    for shard in shards:
        for name, total in shard.sums.items():
            merged.sums[name] = merged.sums[name] + total if name in merged.sums else total
            merged.pixels[name] = merged.pixels.get(name, 0) + shard.pixels[name]
    order = torch.tensor([index for shard in shards for index in shard.indices]).argsort()
    for kind in ("features", "labels"):
        if rows := [batch for shard in shards for batch in getattr(shard, kind)]:
            getattr(merged, kind).append(torch.cat(rows)[order])
    return merged


def fit_head(net: Network, name: str, observed: Observed, device: torch.device, smoothing: float) -> None:
    """Fit a linear head on all cached features by the cross entropy of training, if the targets are class numbers."""
    if not observed.features or not observed.labels:
        return
    features, labels = torch.cat(observed.features), torch.cat(observed.labels)
    features = features.flatten(1) if _is_pixel(features) else features
    weight, bias = _head_parameters(net, name)
    if features.dim() == 2 and _are_classes(labels, len(weight)):
        device = device if features.nbytes <= ON_DEVICE else features.device
        _minimise(features.to(device).float(), labels.long().to(device), smoothing, weight, bias)


def _head_parameters(net: Network, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    task = net.tasks[name]
    held: dict[str, Any] = task.owned if task.head is None else dict(task.head.named_parameters())
    prefix = f"{net.anatomy.heads[0]}." if task.head is None else ""
    return held[f"{prefix}weight"], held.get(f"{prefix}bias")


def _are_classes(labels: Tensor, count: int) -> bool:
    """Whether these are class numbers; a loss of the user's own takes any targets."""
    return labels.dim() == 1 and not labels.is_floating_point() and 0 <= int(labels.min()) <= int(labels.max()) < count


def _is_pixel(features: Tensor) -> bool:
    """Inputs of a head that is a 1x1 convolution on a map of one pixel."""
    return features.dim() > 2 and features[0, 0].numel() == 1


def _minimise(
    features: Tensor, labels: Tensor, smoothing: float, weight: nn.Parameter, bias: nn.Parameter | None
) -> None:
    """Adam on centred and scaled features; centre and scale are then folded into the head.

    All features have one scale: divided by its own deviation, a feature that is almost always 0 on this data would get
    a huge weight, and training would diverge once that feature moves. The loss is that of training: without its label
    smoothing, the logits would be too large, and the first steps would be wild.
    """
    mean, scale = features.mean(0), features.var(0, correction=0).mean().sqrt().clamp(min=1e-4)
    inputs = (features - mean) / scale
    w = torch.zeros(weight.shape[0], inputs.shape[1], device=inputs.device, requires_grad=True)
    b = torch.zeros(weight.shape[0], device=inputs.device, requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=1e-2)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(inputs, w, b), labels, label_smoothing=smoothing) + DECAY * w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        folded = w / scale
        weight.copy_(folded.view_as(weight))
        if bias is not None:
            bias.copy_(b - folded @ mean)

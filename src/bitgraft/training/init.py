"""Initialise a task from its data: norm statistics, a head fitted on cached features, input means.

This takes seconds and saves epochs. Statistics come first, because a head fitted to features normalised by the
backbone's statistics is useless once the task's own are used; kept statistics stay the backbone's. Each process runs
its shard of the images; all end with the same task.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task
from bitgraft.training.batches import call_model, to_device
from bitgraft.training.config import Config
from bitgraft.training.inputs import check_several_classes
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Loader
from bitgraft.training.processes import broadcast_from_main, from_main, gathered_in_main
from bitgraft.training.sync_bn import over_processes

STEPS = 300
DECAY = 3e-3  # on features of unit scale; with less the head overfits
ON_DEVICE = 1 << 30  # bytes of features up to which the head is fitted on the device instead of the CPU


def initialize(task: Task, train_loader: Loader, objective: Objective, config: Config) -> None:
    """Prepare a task for its first step, as the configuration says."""
    data, accelerator, workers = train_loader.data, train_loader.accelerator, train_loader.workers
    broadcast_from_main(task, accelerator)
    if config.head_init:
        order = {"seed": config.seed, "min_size": 2}
        shuffled = Loader(data, "training", task.name, config.batch, accelerator, workers, **order)
        reset_statistics(task, shuffled, objective)
    correct_means = config.mean_shift_correction and config.statistics == "kept"
    if config.head_init or correct_means:
        plain = data.without_augmentation() if hasattr(data, "without_augmentation") else data
        in_order = Loader(plain, "training", task.name, 4 * config.batch, accelerator, workers, pad=False)
        observed = observe(task, in_order, head=config.head_init, means=correct_means)
        for labels in observed.labels:
            objective.check_labels(task.name, labels, in_order.name)
        if shards := gathered_in_main(observed, accelerator):
            observed = _merged(shards)
            if observed.labels and objective.loss is None and observed.labels[0].dim() == 1:
                check_several_classes(task, torch.cat(observed.labels).tolist())
            fit_head(task, observed, accelerator.device, config.label_smoothing)
        means = from_main(observed.means, accelerator)
        task.correct_mean_shift({weight: mean.to(accelerator.device) for weight, mean in means.items()})
    broadcast_from_main(task, accelerator)


@torch.no_grad()
def reset_statistics(task: Task, loader: Loader, objective: Objective) -> None:
    """Set the statistics that training updates to the mean over one pass."""
    task_module = TaskModule(task.train())
    task_module.refresh()
    layers: list[Any] = [m for m in task_module.module.modules() if getattr(m, "num_batches_tracked", None) is not None]
    layers = [layer for layer in layers if layer.training]
    for layer in layers:  # of this temporary module only
        layer.momentum = None  # a cumulative average
        layer.num_batches_tracked.zero_()
    for batch in loader.from_step(0, 0) if layers else ():
        inputs, targets = to_device((batch.inputs, batch.targets), loader.accelerator.device)
        with over_processes(loader.accelerator, count=batch.micro_batches[0].local_size > 0):
            objective.run(task_module, task.name, inputs, targets)


def corrected_weights(task: Task) -> list[str]:
    """Convolution weights that the task changes and that feed a norm layer whose bias and statistics it owns.

    Not if the norm layer is fed by other weights, or shares its bias: one bias cannot correct several means.
    """
    weights, changed = task.anatomy.weights, {*task.transforms, *task.owned, *task.shared}
    fed = Counter(weight.feeds for weight in weights.values())
    return [
        name
        for name, weight in weights.items()
        if name in changed
        and weight.kind == "conv"
        and weight.feeds is not None
        and fed[weight.feeds] == 1
        and all(f"{weight.feeds}.{part}" in task.owned for part in ("weight", "bias", "running_var"))
        and not task.anatomy.is_tied(f"{weight.feeds}.bias")
    ]


@dataclass
class Observed:
    """What one pass over the training images collects."""

    indices: list[int]
    """The images, in order."""
    features: list[Tensor] = field(default_factory=list)
    """Inputs of the head, on the CPU."""
    labels: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of each corrected weight, summed over images and pixels."""
    pixels: dict[str, int] = field(default_factory=dict)

    def add_features(self, features: Tensor) -> None:
        """Keep features that a linear head can be fitted on, one vector per image."""
        if features.dim() > 1 and features[0, 0].numel() == 1:  # a 1x1 convolution may see a map of one pixel
            self.features.append(features.flatten(1).cpu())

    @property
    def means(self) -> dict[str, Tensor]:
        """For each corrected weight, its mean input; it broadcasts against the weight."""
        return {name: total / self.pixels[name] for name, total in self.sums.items()}


@torch.no_grad()
def observe(task: Task, loader: Loader, *, head: bool = False, means: bool = False) -> Observed:
    """Run all images in evaluation mode and collect the head's inputs and labels, input means, or both."""
    anatomy, task_module = task.anatomy, TaskModule(task.eval())
    task_module.refresh()
    observed = Observed([index for shard in loader.batches for index in shard])
    if head := head and len(anatomy.heads) < 2 and task.metadata.head in ("classes", "linear"):
        layer = task.head if task.head is not None else task_module.module.get_submodule(anatomy.heads[0])
        hook = layer.register_forward_pre_hook(lambda layer, args: observed.add_features(args[0]))
    weights = corrected_weights(task) if means else []
    inputs = InputSums({id(task_module.module.get_parameter(weight)): weight for weight in weights})
    try:
        for images, targets in loader:
            with inputs:
                call_model(task_module, to_device(images, loader.accelerator.device), anatomy.dtype)
            if head and isinstance(targets, Tensor):
                observed.labels.append(targets)
    finally:
        if head:
            hook.remove()
    observed.sums, observed.pixels = {weight: total.cpu() for weight, total in inputs.sums.items()}, inputs.pixels
    return observed


class InputSums(TorchFunctionMode):
    """Within it, sum the input patches of convolutions, by kernel. `kernels` maps the `id` of a kernel to its name."""

    def __init__(self, kernels: Mapping[int, str]) -> None:
        super().__init__()
        self.kernels = kernels
        self.sums: dict[str, Tensor] = {}
        self.pixels: dict[str, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in (F.conv2d, torch.conv2d):
            self._add(output, *args, **(kwargs or {}))
        return output

    def _add(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        name = self.kernels.get(id(weight))
        if name is None or isinstance(padding, str) or groups not in (1, len(weight)):
            return
        summed = input.float().sum(0, keepdim=True)  # first over images: the sum of patches is linear
        patches = F.unfold(summed, weight.shape[2:], dilation, padding, stride)
        total = patches.sum(2).view(-1 if groups > 1 else 1, *weight.shape[1:])
        self.sums[name] = self.sums.get(name, 0) + total
        self.pixels[name] = self.pixels.get(name, 0) + output[:, 0].numel()


def _merged(shards: list[Observed]) -> Observed:
    """What all processes observed, in the order of one process."""
    if len(shards) == 1:
        return shards[0]
    merged = Observed([index for shard in shards for index in shard.indices])
    for shard in shards:
        for name, total in shard.sums.items():
            merged.sums[name] = merged.sums.get(name, 0) + total
            merged.pixels[name] = merged.pixels.get(name, 0) + shard.pixels[name]
    order = torch.tensor(merged.indices).argsort()
    for kind in ("features", "labels"):
        if rows := [batch for shard in shards for batch in getattr(shard, kind)]:
            getattr(merged, kind).append(torch.cat(rows)[order])
    return merged


def fit_head(task: Task, observed: Observed, device: torch.device, smoothing: float) -> None:
    """Fit a linear head on all cached features by the cross entropy of training, if the targets are class numbers."""
    if not observed.features or not observed.labels:
        return
    features, labels = torch.cat(observed.features), torch.cat(observed.labels)
    held: dict[str, Any] = task.owned if task.head is None else dict(task.head.named_parameters())
    prefix = f"{task.anatomy.heads[0]}." if task.head is None else ""
    weight, bias = held[f"{prefix}weight"], held.get(f"{prefix}bias")
    numbers = labels.dim() == 1 and not labels.is_floating_point()  # a loss of the user's own takes any targets
    if numbers and 0 <= int(labels.min()) <= int(labels.max()) < len(weight):
        device = device if features.nbytes <= ON_DEVICE else features.device
        _minimise(features.to(device).float(), labels.long().to(device), smoothing, weight, bias)


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

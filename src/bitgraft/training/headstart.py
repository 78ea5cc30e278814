"""Fit a task's head on cached features before anything else learns: seconds that save epochs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.network import Network

STEPS = 300
DECAY = 1e-4


def fit_head(net: Network, name: str, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> bool:
    """Minimise the head's cross entropy over all of the data at once. False where the head is not a linear one."""
    task = net.tasks[name]
    if task.card.head not in ("classes", "linear"):
        return False
    features, labels = _features(net, name, batches, device)
    if features.dim() != 2:
        return False
    weight, bias = _head_parameters(net, name)
    _minimise(features.float(), labels, weight, bias)
    return True


def _head_parameters(net: Network, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    task = net.tasks[name]
    if task.head is not None:
        held: dict[str, Any] = dict(task.head.named_parameters())
        return held["weight"], held.get("bias")
    owned: dict[str, Any] = task.owned
    return owned[f"{net.anatomy.head}.weight"], owned.get(f"{net.anatomy.head}.bias")


@torch.no_grad()
def _features(
    net: Network, name: str, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """What the head takes in, for every image, with the task as it starts and in evaluation mode."""
    task = net.tasks[name]
    was_training = task.training
    task.eval()
    module = net.module(name)
    head = task.head if task.head is not None else module.get_submodule(net.anatomy.head or "")
    taken: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda layer, args: taken.append(args[0]))
    try:
        labels = []
        for images, targets in batches:
            net(images.to(device), task=name)
            labels.append(targets.to(device))
    finally:
        hook.remove()
        task.train(was_training)
    return torch.cat(taken).flatten(1) if taken[0].dim() > 2 else torch.cat(taken), torch.cat(labels)


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

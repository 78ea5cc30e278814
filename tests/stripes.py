"""A small network and a data set that it learns in seconds."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft.network import Network
from bitgraft.training.presets import QUICK


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 5),
    ).eval()


def stripes(size: int, seed: int) -> TensorDataset:
    """Three classes: noise, noise with bright rows, noise with bright columns."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 3
    images = torch.randn(size, 1, 12, 12, generator=rng)
    images[labels == 1, :, ::2] += 1.0
    images[labels == 2, :, :, ::2] += 1.0
    return TensorDataset(images, labels)


def network(method: str = "full", name: str = "stripes") -> Network:
    net = Network(backbone())
    net.add_task(name, classes=3, method=method, preset=None)
    return net


def without_dropout(net: Network) -> Network:
    for module in net.backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def stop_after(steps: int) -> Callable[[], bool]:
    calls = count(1)
    return lambda: next(calls) == steps


def saved_bytes(net: Network, path: Path) -> bytes:
    net.save_task("stripes", path)
    return path.read_bytes()


SHORT = QUICK.changed(epochs=2, batch=16, warmup=0.5, keep="last")
PROPORTIONATE = SHORT.changed(  # SGD: Adam normalises gradients, which amplifies the rounding of tiny ones
    optimizers=dict.fromkeys(QUICK.optimizers, "sgd"),
    rates={"scores": 3e-3, "k": 3e-3, "k1": 3e-3, "norms": 3e-3, "weights": 3e-3, "head": 3e-3},
)

"""A small network and a data set that it learns in seconds, for tests of training."""

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


def stripes(count: int, seed: int) -> TensorDataset:
    """Three classes: noise, noise with bright rows, noise with bright columns."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.randn(count, 1, 12, 12, generator=rng)
    images[labels == 1, :, ::2] += 1.0
    images[labels == 2, :, :, ::2] += 1.0
    return TensorDataset(images, labels)


def network(method: str = "full", name: str = "stripes") -> Network:
    net = Network(backbone())
    net.add_task(name, classes=3, method=method, preset=None)
    return net


SHORT = QUICK.changed(epochs=2, batch=16, warmup=0.5)
PROPORTIONATE = SHORT.changed(  # Adam divides by a gradient's size, and so makes much of the rounding of a tiny one
    optimizers=dict.fromkeys(QUICK.optimizers, "sgd"),
    rates={"scores": 1e-2, "k": 1e-2, "k1": 1e-2, "norms": 1e-2, "weights": 1e-2, "head": 1e-2},
)

"""The method against an independent layer in plain autograd, without any code of ours.

The layer follows equation (2) as in the authors' own code: W + k2 M + k3 W∘M + k1, with one scalar each per layer, and
a hard threshold with a straight-through gradient. Both train for 25 steps of Adam.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft import Network

STEPS = 25
RATE = 1e-4
THRESHOLD = {"full": 0.0, "piggyback-bn": 5e-3}


class Threshold(torch.autograd.Function):
    """1[R >= threshold] with the gradient passed straight through."""

    @staticmethod
    def forward(_: Any, scores: Tensor, threshold: float) -> Tensor:
        return (scores >= threshold).float()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class MaskedConv(nn.Module):
    """A convolution with a frozen weight, transformed by equation (2) or only masked (Piggyback)."""

    def __init__(self, conv: nn.Conv2d, method: str, scores: Tensor) -> None:
        super().__init__()
        self.conv, self.method, self.scores = (conv,), method, nn.Parameter(scores.clone())
        if method == "full":
            self.k1, self.k2, self.k3 = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        conv, mask = self.conv[0], Threshold.apply(self.scores, THRESHOLD[self.method])
        weight = conv.weight.detach()
        if self.method == "full":
            weight = weight + self.k1 + self.k2 * mask + self.k3 * (weight * mask)
        else:
            weight = weight * mask
        return F.conv2d(x, weight, None, conv.stride, conv.padding)


class Block(nn.Module):
    """3x3, norm, ReLU, 3x3, norm, plus a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def backbone() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


def reference(net: Network, method: str) -> nn.Sequential:
    """Return the reference of an untrained task, with the same R, norms and head."""
    task, module = net.tasks["t"], copy.deepcopy(net.backbone)
    for name, transform in task.transforms.items():
        path = name.removesuffix(".weight")
        conv = module.get_submodule(path)
        conv.weight.requires_grad_(False)
        module.set_submodule(path, MaskedConv(conv, method, transform.scores.detach()))
    module[5] = nn.Linear(16, 4)
    module[5].load_state_dict({key: task.owned[f"5.{key}"].detach().clone() for key in ("weight", "bias")})
    return module.train()


def batches() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 12, 12, generator=rng), torch.randint(4, (8,), generator=rng)) for _ in range(STEPS)]


def step(optimizer: torch.optim.Optimizer, scores: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def layers(module: nn.Module) -> dict[str, MaskedConv]:
    return {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, MaskedConv)}


def both(method: str) -> tuple[Network, nn.Sequential, torch.optim.Optimizer, torch.optim.Optimizer]:
    net = Network(backbone())
    task = net.add_task("t", classes=4, method=method, preset=None, seed=3).train()
    plain = reference(net, method)
    ours = torch.optim.Adam([p for p in task.parameters() if p.requires_grad], RATE, foreach=False)
    theirs = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], RATE, foreach=False)
    return net, plain, ours, theirs


def test_piggyback_with_own_norms_agrees_bit_by_bit():
    net, plain, ours, theirs = both("piggyback-bn")
    for images, labels in batches():
        assert step(ours, net(images, task="t"), labels) == step(theirs, plain(images), labels)
    for name, layer in layers(plain).items():
        assert torch.equal(net.tasks["t"].transforms[name].scores, layer.scores)


def test_full_agrees_step_by_step():
    """All R are near the threshold, where rounding decides which bits flip, so the two would diverge after some steps.

    The reference therefore takes over our state after each step."""
    net, plain, ours, theirs = both("full")
    task = net.tasks["t"]
    for images, labels in batches():
        assert step(ours, net(images, task="t"), labels) == pytest.approx(step(theirs, plain(images), labels), rel=1e-5)
        for name, layer in layers(plain).items():
            transform = task.transforms[name]
            _, k1, k2, k3 = transform.values().detach()
            assert torch.allclose(torch.stack([k1, k2, k3]), torch.stack([layer.k1, layer.k2, layer.k3]), atol=1e-6)
            flipped = (transform.mask() != (layer.scores >= 0)).float().mean()
            assert flipped < 0.01  # where R is within rounding of 0
            with torch.no_grad():
                for mine, their in zip((k1, k2, k3), (layer.k1, layer.k2, layer.k3), strict=True):
                    their.copy_(mine)
                layer.scores.copy_(transform.scores)
    assert all(0 < float(transform.mask().float().mean()) < 1 for transform in task.transforms.values())


@pytest.mark.parametrize("method", ["full", "piggyback-bn"])
def test_the_reference_starts_as_the_task(method):
    net, plain, _, _ = both(method)
    images, _ = batches()[0]
    with torch.no_grad():
        assert torch.equal(net(images, task="t"), plain(images))

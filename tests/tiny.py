"""Small networks and helpers that several test files share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft import Network

METHODS = [
    "classifier",
    "norms",
    "finetune",
    "adapters-parallel",
    "adapters-series",
    "adapters-joint",
    "lora",
    "dan",
    "full",
    "simple",
    "piggyback",
    "piggyback-bn",
    "packnet",
]


class Tiny(nn.Module):
    """A stem, a depthwise and a pointwise convolution, batch norms, dropout and a linear head: quick, and varied."""

    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.depthwise(x)))
        return self.fc(self.drop(F.relu(self.pointwise(x)).mean((2, 3))))


def settled(module: nn.Module) -> nn.Module:
    """Give norm layers scales, shifts and statistics as a pretrained network has them."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.1)
            nn.init.normal_(layer.running_mean, std=0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
            layer.num_batches_tracked.fill_(7)
    return module


def tiny(seed: int = 0, **options: Any) -> Tiny:
    torch.manual_seed(seed)
    return settled(Tiny(**options)).eval()


def hidden_head() -> nn.Sequential:
    """A network whose head cannot be told: something comes behind it, and nothing says how many classes there are."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(1))


def batch(count: int = 4, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(count, *(shape or (3, 8, 8)), generator=torch.Generator().manual_seed(seed))


def scores(output: Any) -> Tensor:
    return getattr(output, "logits", output)


@torch.no_grad()
def run(net: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return scores(net(*args, **kwargs))


def learn(net: Network, name: str, images: Tensor, *, steps: int = 2, rate: float = 0.1) -> list[Tensor]:
    """Some steps of SGD on made-up labels, in training mode; the losses."""
    task, losses = net.tasks[name].train(), []
    optimizer = torch.optim.SGD([p for p in task.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        optimizer.zero_grad()
        output = scores(net(images, task=name)).flatten(1)
        loss = F.cross_entropy(output, torch.arange(len(images)) % output.shape[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    task.eval()
    return losses


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that adding, training and running tasks must leave alone."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "values": {n: t.detach().clone().contiguous().view(-1).view(torch.uint8).tolist() for n, t in tensors.items()},
        "ids": {n: id(t) for n, t in tensors.items()},
        "layout": {n: (t.shape, t.stride(), t.dtype, t.device, t.data_ptr()) for n, t in tensors.items()},
        "gradients": {n: (t.requires_grad, t.grad is None) for n, t in tensors.items()},
        "modes": {n: m.training for n, m in module.named_modules()},
        "types": {n: (id(m), type(m)) for n, m in module.named_modules()},
        "hooks": {n: [len(v) for k, v in vars(m).items() if k.endswith("_hooks")] for n, m in module.named_modules()},
        "other": {n: sorted(vars(m)) for n, m in module.named_modules()},
    }

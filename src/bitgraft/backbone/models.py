"""The paper's two small networks, for 64 x 64 images: a wide ResNet, and the decathlon's ResNet-26."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _PreActivation(nn.Module):
    """norm, ReLU, 3x3, norm, ReLU, 3x3, around a shortcut (Zagoruyko and Komodakis)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(active))))
        short = x if self.shortcut is None else self.shortcut(active)
        total: Tensor = short + y
        return total


class WideResNet(nn.Module):
    """Stem, three stages of pre-activation blocks, each with stride 2, then norm, ReLU, pooling and a linear head."""

    input_size = (3, 64, 64)

    def __init__(self, depth: int, width: int, num_classes: int) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"a wide ResNet's depth is 6 n + 4 (10, 16, 22, 28, ...), not {depth}")
        self.num_classes = num_classes
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(*(_stage(channels[i], channels[i + 1], (depth - 4) // 6) for i in range(3)))
        self.norm = nn.BatchNorm2d(channels[-1])
        self.fc = nn.Linear(channels[-1], num_classes) if num_classes else nn.Identity()
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.norm(self.stages(self.conv1(x))))
        scores: Tensor = self.fc(features.mean((2, 3)))
        return scores


def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    later = (_PreActivation(outputs, outputs, 1) for _ in range(blocks - 1))
    return nn.Sequential(_PreActivation(inputs, outputs, 2), *later)


class _PostActivation(nn.Module):
    """3x3, norm, ReLU, 3x3, norm, then ReLU of the sum; a shortcut that halves and doubles has no weights."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
            x = torch.cat([x, torch.zeros_like(x)], 1)
        return F.relu(y + x)


class ResNet26(nn.Module):
    """The residual adapters' network: a 3x3 stem, three stages of four blocks, each of stride 2, norm and ReLU."""

    input_size = (3, 64, 64)

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        channels = [int(c * width) for c in (32, 64, 128, 256)]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels[0])
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    _PostActivation(channels[i], channels[i + 1], 2),
                    *(_PostActivation(channels[i + 1], channels[i + 1], 1) for _ in range(3)),
                )
                for i in range(3)
            )
        )
        self.norm = nn.BatchNorm2d(channels[-1])
        self.fc = nn.Linear(channels[-1], num_classes) if num_classes else nn.Identity()
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.norm(self.stages(F.relu(self.norm1(self.conv1(x))))))
        scores: Tensor = self.fc(features.mean((2, 3)))
        return scores


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def wide_resnet(depth: int = 28, width: int = 4, num_classes: int = 1000) -> WideResNet:
    """A wide ResNet for 64 x 64 images; WRN-28-4 is the paper's network for the decathlon."""
    return WideResNet(depth, width, num_classes)


def resnet26(num_classes: int = 1000, width: float = 1.0) -> ResNet26:
    """The ResNet-26 of the decathlon's authors, on which residual adapters are counted."""
    return ResNet26(num_classes, width)

"""The paper's two small networks, for 64 x 64 images: a wide ResNet, and the decathlon's ResNet-26."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class _PreActivation(nn.Module):
    """norm, ReLU, 3x3, norm, ReLU, 3x3, plus a shortcut (Zagoruyko and Komodakis)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), _conv3x3(inputs, outputs, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), _conv3x3(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        y: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return y + (x if self.shortcut is None else self.shortcut(active))


class _PostActivation(nn.Module):
    """3x3, norm, ReLU, 3x3, norm, plus a shortcut without weights, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
            x = torch.cat([x, torch.zeros_like(x)], 1)
        return F.relu(y + x)


class SmallResNet(nn.Module):
    """A 3x3 stem, three stages of blocks with stride 2, then norm, ReLU, average pooling and a linear head."""

    input_size = (3, 64, 64)

    def __init__(
        self, block: type[nn.Module], blocks: int, channels: list[int], num_classes: int, *, stem_norm: bool
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = _conv3x3(3, channels[0])
        self.norm1 = nn.BatchNorm2d(channels[0]) if stem_norm else None
        stages = (
            nn.Sequential(block(inputs, outputs, 2), *(block(outputs, outputs, 1) for _ in range(blocks - 1)))
            for inputs, outputs in pairwise(channels)
        )
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels[-1])
        self.fc = nn.Linear(channels[-1], num_classes) if num_classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x) if self.norm1 is None else F.relu(self.norm1(self.conv1(x)))
        scores: Tensor = self.fc(F.relu(self.norm(self.stages(x))).mean((2, 3)))
        return scores


def wide_resnet(depth: int = 28, width: int = 4, num_classes: int = 1000) -> SmallResNet:
    """A wide ResNet for 64 x 64 images; WRN-28-4 is the paper's network for the decathlon."""
    if (depth - 4) % 6 or depth < 10 or width < 1:
        raise ValueError(
            f"a wide ResNet's depth is 6 n + 4 (10, 16, 22, 28, ...), its width 1 or more, not {depth}-{width}"
        )
    channels = [16, 16 * width, 32 * width, 64 * width]
    return SmallResNet(_PreActivation, (depth - 4) // 6, channels, num_classes, stem_norm=False)


def resnet26(num_classes: int = 1000, width: float = 1.0) -> SmallResNet:
    """The ResNet-26 of the decathlon's authors, which residual adapters were published for."""
    channels = [int(c * width) for c in (32, 64, 128, 256)]
    return SmallResNet(_PostActivation, 4, channels, num_classes, stem_norm=True)

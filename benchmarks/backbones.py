"""Custom backbones for benchmarks: `--backbone benchmarks.backbones:resnet50_v1`."""

from functools import partial

from torch import nn
from torchvision.models import resnet50


def resnet50_v1(num_classes: int = 1000) -> nn.Module:
    """ResNet-50 v1, as in Keras and Caffe: the stride of a stage is in its first 1x1 convolution."""
    model = resnet50(num_classes=num_classes, norm_layer=partial(nn.BatchNorm2d, eps=1e-3))
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    model.pretrained_cfg = {
        "input_size": (3, 224, 224),
        "mean": (0.485, 0.458, 0.4076),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bilinear",
        "classifier": "fc",
    }
    return model

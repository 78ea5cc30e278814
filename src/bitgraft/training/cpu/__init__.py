"""Faster training on a CPU, unless BITGRAFT_KERNELS=off. Other folders import only the two functions below.

May import: task, transforms, errors.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bitgraft.task import Task
from bitgraft.training.cpu.convolutions import Convolutions
from bitgraft.transforms import kernels
from bitgraft.transforms.masked import Masked


def fast_convolutions(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, convolutions that are trained on a CPU use the fastest algorithm."""
    return Convolutions() if device.type == "cpu" and kernels.switched_on() else nullcontext()


def set_channels_last(task: Task, on: bool) -> None:
    """Compute W~ in channels_last. With images in that layout, convolutions otherwise copy W~ twice per step."""
    for module in task.modules():
        if isinstance(module, Masked):
            module.channels_last = on and kernels.switched_on()
    task.revision += 1

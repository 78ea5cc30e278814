"""What only makes training on a CPU faster; BITGRAFT_KERNELS=off leaves everything to PyTorch.

`fast_convolutions` and `set_channels_last` are the door: nothing outside this folder imports its modules.

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
    """Within it, each convolution that learns on a CPU does so in the fastest way."""
    return Convolutions() if device.type == "cpu" and kernels.switched_on() else nullcontext()


def set_channels_last(task: Task, on: bool) -> None:
    """Let masks that learn give W~ with the channels last: a convolution would copy it twice a step otherwise, where
    images are laid out so."""
    for module in task.modules():
        if isinstance(module, Masked):
            module.channels_last = on and kernels.switched_on()
    task.revision += 1

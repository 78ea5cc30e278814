"""Features of an image that tell its task: the input of the plain backbone's head, and channel means at several depths.

Tasks often differ in texture, colour and scale, which early layers see and the head's input has discarded.
"""

import threading
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.head_layers import unknown_head
from bitgraft.backbone.tracing import logits
from bitgraft.runtime.new_task import plain_task
from bitgraft.runtime.task_module import TaskModule

DEPTHS = 12  # norm layers, evenly spaced
WIDTH = 48  # numbers per norm layer; wider ones are projected
WEIGHT = 0.6  # of each norm layer, relative to the head's input


class PlainFeatures:
    """Computes features with the plain backbone. Threads may share it."""

    def __init__(self, anatomy: Anatomy) -> None:
        if not anatomy.head_known:
            raise unknown_head(anatomy.backbone)
        self._headless = TaskModule(plain_task(anatomy, "features", "none").eval())
        self._seen = threading.local()
        for name in evenly_spaced(list(anatomy.norms), DEPTHS):
            self._headless.module.get_submodule(name).register_forward_hook(self._note)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return features of length 1, (N, features)."""
        self._headless.refresh()
        self._seen.means = []
        output = logits(self._headless(images)).float()
        head_input = F.normalize(output.flatten(2).mean(2) if output.dim() > 2 else output, dim=1)
        means = [m.view(len(images), -1, m.shape[1]).mean(1) for m in self._seen.means if len(m) % len(images) == 0]
        return F.normalize(torch.cat([head_input, *(WEIGHT * projected(F.normalize(m, dim=1)) for m in means)], 1))

    def _note(self, norm: nn.Module, _: object, output: Tensor) -> None:
        channels = next(chain(norm.parameters(), norm.buffers())).numel()
        last = output if output.shape[-1] == channels else output.movedim(1, -1)  # tokens, or feature maps
        if last.shape[-1] == channels:
            self._seen.means.append(last.float().reshape(len(output), -1, channels).mean(1))


def evenly_spaced(names: list[str], count: int) -> list[str]:
    """Return `count` of the names at equal distances, or all of them if there are fewer."""
    if len(names) <= count:
        return names
    return [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]


def projected(means: Tensor) -> Tensor:
    """Project (N, channels) to at most WIDTH numbers by random signs, which are the same on every machine."""
    channels = means.shape[1]
    if channels <= WIDTH:
        return means
    signs = np.random.RandomState(0).choice([-1.0, 1.0], (channels, WIDTH)) / WIDTH**0.5
    return means @ torch.from_numpy(signs).to(means)

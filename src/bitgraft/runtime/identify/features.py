"""Features of the plain backbone: the input of its head, pooled and l2-normalised."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bitgraft.backbone.anatomy import Anatomy, unknown_head
from bitgraft.backbone.tracing import logits
from bitgraft.format.metadata import Metadata
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task


class PlainFeatures:
    """The backbone without its head. It shares the backbone's memory and follows writes to it."""

    def __init__(self, anatomy: Anatomy) -> None:
        if not anatomy.head_known:
            raise unknown_head(anatomy.backbone)
        self._module = TaskModule(Task(Metadata("features", "classifier", {}, "none"), anatomy, {}, {}, None).eval())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return unit-length features, (N, features)."""
        self._module.refresh()
        found = logits(self._module(images)).float()
        return F.normalize(found.flatten(2).mean(2) if found.dim() > 2 else found, dim=1)

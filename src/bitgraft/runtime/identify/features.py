"""The plain backbone's features of an image: what its head takes in, pooled and l2-normalised."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bitgraft.backbone.anatomy import Anatomy, unknown_head
from bitgraft.backbone.tracing import logits
from bitgraft.format.metadata import Metadata
from bitgraft.runtime.task_module import TaskModule
from bitgraft.task import Task


class PlainFeatures:
    """The backbone without its head. It follows writes to the backbone, and shares its memory."""

    def __init__(self, anatomy: Anatomy) -> None:
        if not anatomy.head_known:
            raise unknown_head(anatomy.backbone)
        self._module = TaskModule(Task(Metadata("features", "classifier", {}, "none"), anatomy, {}, {}, None).eval())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """(N, features), of length 1 each."""
        self._module.refresh()
        found = logits(self._module(images)).float()
        return F.normalize(found.flatten(2).mean(2) if found.dim() > 2 else found, dim=1)

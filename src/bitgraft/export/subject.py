"""What is exported: a task of a network, what it says of itself, and what it answers to made-up images."""

import importlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft import __version__
from bitgraft.backbone.tracing import logits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import ExportError
from bitgraft.network import Network
from bitgraft.task import Metadata

CHECKED = (1, 3)  # batches on which a written file must agree with the task; tracing sees another size, 2
TRACED = 2


@dataclass(frozen=True)
class Subject:
    net: Network
    name: str

    @property
    def metadata(self) -> Metadata:
        return self.net.tasks[self.name].metadata

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.from_dict(self.metadata.preprocessing)

    def module(self) -> nn.Module:
        """An ordinary module that gives a tensor of scores."""
        plain = self.net.export(self.name)
        with torch.no_grad():
            output = plain(self.images(1))
        return plain if isinstance(output, Tensor) else _Scores(plain).eval()

    def images(self, count: int) -> Tensor:
        """Noise of the task's input size, the same each time."""
        anatomy, stated = self.net.anatomy, self.preprocessing
        rng = torch.Generator().manual_seed(count)
        images = torch.randn(count, stated.channels, *stated.size, generator=rng)
        return images.to(anatomy.tensor(next(iter(anatomy.places))).device, anatomy.dtype)

    def answer(self, images: Tensor) -> Tensor:
        """What the task itself gives, in evaluation mode."""
        with torch.no_grad():
            return logits(self.net.eval()(images, task=self.name))

    def about(self) -> dict[str, str]:
        """What the file says of itself, as text."""
        return {"bitgraft": __version__, "backbone": self.net.fingerprint, **described(self.metadata)}


def described(metadata: Metadata) -> dict[str, str]:
    preprocessing = Preprocessing.from_dict(metadata.preprocessing).to_dict()
    return {
        "task": metadata.name,
        "method": metadata.method,
        "classes": json.dumps(metadata.classes, ensure_ascii=False),
        "preprocessing": json.dumps(preprocessing),
    }


class _Scores(nn.Module):
    """The tensor of scores of a module that wraps it (transformers)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return logits(self.inner(images))


def need(module: str) -> Any:
    """An optional package, or what to type to have it."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise ExportError(
            f"ONNX files need {module}, which cannot be imported ({cause}): pip install 'bitgraft[onnx]'"
        ) from cause

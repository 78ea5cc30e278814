"""What is exported, and its simplest forms: plain weights and a `torch.export` program."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bitgraft import __version__
from bitgraft.backbone.tracing import logits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import ExportError
from bitgraft.format.metadata import Metadata
from bitgraft.network import Network
from bitgraft.runtime.onnx_graph import program, scores_module

TRACED = 2  # the batch size that tracing sees
CHECKED = (1, 3)  # those on which a file must agree with the task


@dataclass(frozen=True)
class Subject:
    """A task of a network that is to be exported."""

    net: Network
    name: str

    @property
    def metadata(self) -> Metadata:
        return self.net.tasks[self.name].metadata

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.from_dict(self.metadata.preprocessing)

    def module(self) -> nn.Module:
        """An ordinary module that returns a tensor of scores."""
        return scores_module(self.net.export(self.name), self.images(1))

    def images(self, count: int) -> Tensor:
        """Noise of the task's input size, the same each time."""
        first = next(self.net.backbone.parameters())
        shape = (count, self.preprocessing.channels, *self.preprocessing.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(count))
        return images.to(first.device, self.net.anatomy.dtype)

    def answer(self, images: Tensor) -> Tensor:
        """The task's own scores, in evaluation mode."""
        with torch.no_grad():
            return logits(self.net.eval()(images, task=self.name))

    def cases(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What a file is checked on: a name for messages, images, and the task's own scores."""
        for count in CHECKED:
            images = self.images(count)
            yield f"the task {self.name!r} on a batch of {count}", images, self.answer(images)

    def about(self) -> dict[str, Any]:
        """What a file says about the task."""
        return {
            "task": self.metadata.name,
            "method": self.metadata.method,
            "classes": self.metadata.classes,
            "preprocessing": self.preprocessing.to_dict(),
        }

    def header(self) -> dict[str, str]:
        """The same with the versions of bitgraft and the backbone, as text."""
        plain = {"bitgraft": __version__, "backbone": self.net.fingerprint, **self.about()}
        return {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in plain.items()}


def weights(subject: Subject) -> dict[str, Tensor]:
    """The state dict of the backbone's own class with the task in it, each tensor with memory of its own."""
    state = subject.net.export(subject.name).state_dict()
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def weights_bytes(state: Mapping[str, Tensor], header: Mapping[str, str], *, pickled: bool = False) -> bytes:
    """A state dict as a safetensors file, or as `torch.save` writes it, which has no header."""
    if not pickled:
        return safetensors.torch.save(dict(state), dict(header))
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def program_bytes(subject: Subject) -> bytes:
    """A `.pt2` file. It is opened again, and must give the task's scores to the last bit."""
    buffer = io.BytesIO()
    torch.export.save(program(subject.module(), subject.images(TRACED)), buffer, extra_files=subject.header())
    data = buffer.getvalue()
    opened = torch.export.load(io.BytesIO(data)).module()
    for what, images, expected in subject.cases():
        with torch.no_grad():
            if not torch.equal(opened(images), expected):
                raise ExportError(
                    f"the torch.export program gives other scores than {what}, so no file was written; plain weights "
                    "can be exported still"
                )
    return data

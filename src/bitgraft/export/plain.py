"""Export a task as plain weights or as a `torch.export` program."""

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

TRACED = 2  # batch size for tracing
CHECKED = (1, 3)  # batch sizes on which a file is compared with the task


@dataclass(frozen=True)
class Subject:
    """A task to export."""

    net: Network
    name: str

    @property
    def metadata(self) -> Metadata:
        return self.net.tasks[self.name].metadata

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.from_dict(self.metadata.preprocessing)

    def module(self) -> nn.Module:
        """Return a plain module whose output is a tensor of scores."""
        return scores_module(self.net.export(self.name), self.images(1))

    def images(self, count: int) -> Tensor:
        """Return reproducible noise of the task's input size."""
        shape = (count, self.preprocessing.channels, *self.preprocessing.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(count))
        return images.to(self.net.anatomy.device, self.net.anatomy.dtype)

    def answer(self, images: Tensor) -> Tensor:
        """Return the task's scores in evaluation mode."""
        with torch.no_grad():
            return logits(self.net.eval()(images, task=self.name))

    def cases(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield a label for messages, images, and the task's own scores, to check a file with."""
        for count in CHECKED:
            images = self.images(count)
            yield f"the task {self.name!r} on a batch of {count}", images, self.answer(images)

    def about(self) -> dict[str, Any]:
        """Return the task's entries in a file's metadata."""
        return {
            "task": self.metadata.name,
            "method": self.metadata.method,
            "classes": self.metadata.classes,
            "preprocessing": self.preprocessing.to_dict(),
        }

    def header(self) -> dict[str, str]:
        """Return a file's metadata, with values as text."""
        plain = {"bitgraft": __version__, "backbone": self.net.fingerprint, **self.about()}
        return {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in plain.items()}


def weights(subject: Subject) -> dict[str, Tensor]:
    """Return the state dict of the plain backbone with the task's weights; tensors share no memory."""
    state = subject.net.export(subject.name).state_dict()
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def weights_bytes(state: Mapping[str, Tensor], header: Mapping[str, str], *, pickled: bool = False) -> bytes:
    """Return a safetensors file, or if `pickled` one of `torch.save`, which has no header."""
    if not pickled:
        return safetensors.torch.save(dict(state), dict(header))
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def program_bytes(subject: Subject) -> bytes:
    """Return a `.pt2` file, after checking that it gives the task's scores to the last bit."""
    buffer = io.BytesIO()
    torch.export.save(program(subject.module(), subject.images(TRACED)), buffer, extra_files=subject.header())
    data = buffer.getvalue()
    reloaded = torch.export.load(io.BytesIO(data)).module()
    for label, images, expected in subject.cases():
        with torch.no_grad():
            if not torch.equal(reloaded(images), expected):
                raise ExportError(
                    f"the torch.export program gives other scores than {label}, so no file was written; export plain "
                    "weights instead"
                )
    return data

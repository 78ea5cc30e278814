"""Plain weights, and a `torch.export` program."""

import io
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bitgraft.errors import ExportError
from bitgraft.export.subject import CHECKED, TRACED, Subject


def weights(subject: Subject) -> dict[str, Tensor]:
    """The state dict of the backbone's own class with the task in it, each tensor with memory of its own."""
    state = subject.net.export(subject.name).state_dict()
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def weights_bytes(state: Mapping[str, Tensor], about: Mapping[str, str], *, pickled: bool = False) -> bytes:
    """A state dict as a safetensors file, or as `torch.save` writes it, which has no place for `about`."""
    if not pickled:
        return safetensors.torch.save(dict(state), dict(about))
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def program(module: nn.Module, *examples: Tensor) -> ExportedProgram:
    """The module traced, for batches of any size; of the inputs, the first is the batch."""
    shapes = ({0: Dim("batch", min=1)}, *(None for _ in examples[1:]))
    try:
        with torch.no_grad():
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
    except Exception as cause:  # tracing a network can raise nearly anything
        raise ExportError(
            f"torch.export cannot follow {type(module).__name__} for batches of any size "
            f"({type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}); plain weights can be exported still"
        ) from cause


def program_bytes(subject: Subject) -> bytes:
    """A `.pt2` file, opened again and checked: it gives the task's scores to the last bit."""
    buffer = io.BytesIO()
    torch.export.save(program(subject.module(), subject.images(TRACED)), buffer, extra_files=subject.about())
    data = buffer.getvalue()
    opened = torch.export.load(io.BytesIO(data)).module()
    for count in CHECKED:
        images = subject.images(count)
        with torch.no_grad():
            if not torch.equal(opened(images), subject.answer(images)):
                raise ExportError(
                    f"the torch.export program of task {subject.name!r} gives other scores than the task on a batch of "
                    f"{count}, so no file was written; plain weights can be exported still"
                )
    return data

"""`POST /v1/predict/auto`: identify the task of each image and run it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitgraft.errors import BitgraftError
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.predictions import decode_all
from bitgraft.workflows.identification import as_answers
from bitgraft.workflows.prediction import torch_scores


def identify(library: Library, images: Sequence[bytes], top: int, max_pixels: int) -> list[dict[str, Any]]:
    """Return each image's task, the most likely tasks, and the task's answers, as JSON."""
    net = library.net
    entries = {name: entry for name, entry in library.tasks.items() if name != net.original}
    tasks = {name: net.tasks[entry.task_id] for name, entry in entries.items()}
    preprocessings = list(dict.fromkeys(entry.preprocessing for entry in entries.values()))
    decoded = decode_all(images, preprocessings, max_pixels)
    device = net.anatomy.device
    stacked = [torch.stack(tensors).to(device) for tensors in zip(*decoded, strict=True)]
    batches = dict(zip(preprocessings, stacked, strict=True))

    def run(name: str, batch: Tensor) -> Tensor:
        return torch_scores(net, entries[name].task_id, batch).to(device)

    try:
        inputs = {name: batches[entry.preprocessing] for name, entry in entries.items()}
        decided = net._identifier.decide(tasks, inputs, run)
    except BitgraftError as problem:  # no task has a description, or the backbone has no features
        raise HttpError(409, str(problem)) from problem
    return as_answers(decided, {name: entry.classes for name, entry in entries.items()}, top=top)

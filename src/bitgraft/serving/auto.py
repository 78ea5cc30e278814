"""Answers to images whose task nobody names: `POST /v1/predict/auto`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitgraft.errors import BitgraftError
from bitgraft.serving.library import Library
from bitgraft.serving.predictions import decode
from bitgraft.serving.refusals import Refusal
from bitgraft.workflows.identification import as_answers
from bitgraft.workflows.prediction import torch_scores


def find(library: Library, images: Sequence[bytes], top: int, max_pixels: int) -> list[dict[str, Any]]:
    """Each image's task as the store is now, the likeliest tasks, and its answers."""
    net = library.net
    entries = {name: entry for name, entry in library.tasks.items() if entry.name != net.original}
    tasks = {name: net.tasks[entry.inner] for name, entry in entries.items()}
    ways = list(dict.fromkeys(entry.preprocessing for entry in entries.values()))
    decoded = [decode(data, ways, max_pixels, f"image {i + 1}") for i, data in enumerate(images)]
    device = net.anatomy.device
    stacked = {way: torch.stack([image[i] for image in decoded]).to(device) for i, way in enumerate(ways)}

    def run(name: str, batch: Tensor) -> Tensor:
        return torch_scores(net, entries[name].inner, batch).to(device)

    try:
        given = {name: stacked[entry.preprocessing] for name, entry in entries.items()}
        decision = net._identifier.decide(tasks, given, run)
    except BitgraftError as problem:  # no task has a description, or the backbone has no features
        raise Refusal(409, str(problem)) from problem
    return as_answers(decision, {name: entry.classes for name, entry in entries.items()}, top=top)

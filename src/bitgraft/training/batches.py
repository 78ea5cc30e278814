"""Helpers for batches of any form.

Inputs are a tensor, a mapping of named tensors (transformers), or a list of tensors of any size (detectors). Data sets
return pairs (inputs, targets), or one mapping with the targets under "labels".
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bitgraft.errors import TrainingError

LABELS = "labels"


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping) and LABELS in batch:
        return {name: value for name, value in batch.items() if name != LABELS}, batch[LABELS]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a mapping of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise TrainingError(f"a batch is {found}: use pairs (inputs, targets), or a mapping with the targets as 'labels'")


def call_model(module: Callable[..., Any], inputs: Any, dtype: torch.dtype, targets: Any = None) -> Any:
    """Run a module on inputs in its dtype. Pass targets only if it computes its own loss."""
    inputs = tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs, **({} if targets is None else {LABELS: targets}))
    return module(inputs) if targets is None else module(inputs, targets)


def batch_size(inputs: Any) -> int:
    return len(next(iter(inputs.values()))) if isinstance(inputs, Mapping) else len(inputs)


def take_rows(values: Any, rows: slice) -> Any:
    return {name: value[rows] for name, value in values.items()} if isinstance(values, Mapping) else values[rows]


def split_rows(values: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into chunks of these sizes."""
    return [take_rows(values, slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def to_device(values: Any, device: torch.device) -> Any:
    """Move a batch to the device. On a CPU, convert images to channels_last, where convolutions are fastest.

    EfficientNet-Lite0 at 64 px then evaluates in 0.6 and trains in 0.8 of the time.
    """

    def moved(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device, non_blocking=True)
        images = device.type == "cpu" and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    return tree_map_only(Tensor, moved, values)

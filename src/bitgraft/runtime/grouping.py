"""Mixed batches: which rows belong to which task."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bitgraft.errors import TaskError


def rows_by_task(tasks: Sequence[str], inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return each task's rows of a batch, after checking that there is one name per image."""
    batch = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
    if batch is None:
        raise TaskError("a list of task names needs a tensor with one row per name among the inputs")
    if len(batch) != len(tasks):
        raise TaskError(f"got {len(batch)} images and {len(tasks)} task names: pass one name per image")
    return {name: [i for i, task in enumerate(tasks) if task == name] for name in dict.fromkeys(tasks)}


def select(value: Any, rows: list[int], images: int) -> Any:
    """Return these rows of a tensor with one row per image, and any other value as it is."""
    return value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == images else value


def names_tasks(value: Any) -> bool:
    """Return whether a value is a task's name or a list of names."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)
    )

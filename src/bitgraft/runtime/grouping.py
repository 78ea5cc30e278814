"""A mixed batch: rows grouped by task on the way in, and put back in order on the way out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bitgraft.errors import TaskError


def rows_by_task(tasks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
    """Which rows of the batch each task takes. The first tensor among the inputs says how many rows there are."""
    batch = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if batch is None:
        raise TaskError("a batch for several tasks needs a tensor with one row for each task name")
    if len(batch) != len(tasks):
        raise TaskError(f"{len(batch)} images came with {len(tasks)} task names: give one name per image")
    return {name: [i for i, wanted in enumerate(tasks) if wanted == name] for name in dict.fromkeys(tasks)}


def select(value: Any, rows: Sequence[int], count: int) -> Any:
    """These rows of an input that has one for each image; other inputs as they are."""
    is_batch = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
    return value[rows] if is_batch else value


def in_order(groups: Iterable[tuple[Sequence[int], Tensor]]) -> list[Tensor]:
    """One result per image, from each group's rows and its results."""
    results = {row: result for rows, group in groups for row, result in zip(rows, group, strict=True)}
    return [results[row] for row in range(len(results))]

"""A mixed batch: rows grouped by task on the way in, and put back in order on the way out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from bitgraft.errors import TaskError


class Group(NamedTuple):
    """One task's part of a batch."""

    rows: list[int]
    inputs: list[Any]
    named: dict[str, Any]


def by_task(tasks: Sequence[str], inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Group]:
    """Each task's rows of every input that has one row per image, and the other inputs as they are."""
    batch = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
    if batch is None:
        raise TaskError("a batch for several tasks needs a tensor with one row for each task name")
    if len(batch) != len(tasks):
        raise TaskError(f"{len(batch)} images came with {len(tasks)} task names: give one name per image")

    def select(value: Any, rows: list[int]) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == len(tasks) else value

    groups = {}
    for name in dict.fromkeys(tasks):
        rows = [i for i, wanted in enumerate(tasks) if wanted == name]
        parts = {key: select(value, rows) for key, value in named.items()}
        groups[name] = Group(rows, [select(value, rows) for value in inputs], parts)
    return groups


def in_order(groups: Iterable[Group], outputs: Iterable[Tensor]) -> list[Tensor]:
    """One result per image, from each group's results."""
    found = {
        row: one for group, many in zip(groups, outputs, strict=True) for row, one in zip(group.rows, many, strict=True)
    }
    return [found[row] for row in range(len(found))]


def names_tasks(value: Any) -> bool:
    """A task's name, or a list of names."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)
    )

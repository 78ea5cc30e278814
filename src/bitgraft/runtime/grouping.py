"""Mixed batches: group the rows by task, and put the outputs back in order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from bitgraft.errors import TaskError


class Group(NamedTuple):
    """One task's rows of a batch."""

    rows: list[int]
    inputs: list[Any]
    named: dict[str, Any]


def by_task(tasks: Sequence[str], inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Group]:
    """Group the inputs by task. Those without one row per image are passed to every group."""
    batch = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
    if batch is None:
        raise TaskError("a list of task names needs a tensor with one row per name among the inputs")
    if len(batch) != len(tasks):
        raise TaskError(f"got {len(batch)} images and {len(tasks)} task names: pass one name per image")

    def select(value: Any, rows: list[int]) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == len(tasks) else value

    groups = {}
    for name in dict.fromkeys(tasks):
        rows = [i for i, task in enumerate(tasks) if task == name]
        selected = {key: select(value, rows) for key, value in named.items()}
        groups[name] = Group(rows, [select(value, rows) for value in inputs], selected)
    return groups


def in_order(groups: Iterable[Group], outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return one output per image, in the order of the batch."""
    by_row: dict[int, Tensor] = {}
    for group, output in zip(groups, outputs, strict=True):
        by_row.update(zip(group.rows, output, strict=True))
    return [by_row[row] for row in range(len(by_row))]


def names_tasks(value: Any) -> bool:
    """Return whether a value is a task's name or a list of names."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)
    )

"""The tables that the paper prints."""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublishedRow:
    row: str
    title: str
    values: Mapping[str, float]
    """By data set: accuracy in per cent, or S."""
    params: str | None = None
    whole: float | None = None
    """The printed mean or total over all data sets."""
    k: Sequence[str] = ()

    def over(self, datasets: Collection[str], combine: Callable[[Iterable[float]], float]) -> float | None:
        """The mean or total over these data sets; the printed one if they are all of the table's."""
        if self.whole is not None and set(datasets) == set(self.values):
            return self.whole  # rounded once, from more decimals than the cells have
        values = [self.values[name] for name in datasets if name in self.values]
        return combine(values) if len(values) == len(datasets) else None


@dataclass(frozen=True)
class PublishedTable:
    form: str
    """accuracy, decathlon, scores or ablation."""
    backbone: str
    caption: str
    datasets: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


@cache
def published() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """Every table of the paper, in its order."""
    return tuple(_table(**table) for table in published()["table"])


def _table(form: str, backbone: str, caption: str, datasets: list[str], rows: list[dict[str, Any]]) -> PublishedTable:
    made = [PublishedRow(**{**row, "values": dict(zip(datasets, row["values"], strict=True))}) for row in rows]
    return PublishedTable(form, backbone, caption, tuple(datasets), tuple(made))


def published_table(form: str, backbone: str, datasets: Iterable[str]) -> PublishedTable | None:
    """The paper's table of this form that shares a data set with ours, of the same backbone if there is one."""
    ours = set(datasets)
    fitting = [table for table in published_tables() if table.form == form and ours & set(table.datasets)]
    return next((table for table in fitting if table.backbone == backbone), fitting[0] if fitting else None)

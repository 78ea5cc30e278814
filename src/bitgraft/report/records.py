"""Records of runs, one JSON file each, and what a suite says of the order and names of its tables."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from bitgraft.errors import DataError

FORMAT = 1
RECORD, SUITE = "record.json", "suite.json"
Form = Literal["accuracy", "decathlon", "ablation"]
FORMS = ("accuracy", "decathlon", "ablation")


@dataclass(frozen=True)
class Record:
    """One run: a method on a data set with a seed."""

    file: Path
    suite: str
    row: str
    title: str
    method: str
    options: Mapping[str, Any]
    dataset: str
    seed: int
    backbone: str
    config: Mapping[str, Any]
    last: float | None
    """Test accuracy after the last epoch, from 0 to 1."""
    selected: float | None
    """That of the epoch that was best on validation."""
    bits: float
    backbone_bits: float
    seconds: float | None
    train_images_seen: int | None
    peak_memory: float | None
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Suite:
    """Names and order; what it does not list comes after, by name."""

    name: str
    form: Form | None = None
    title: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    baseline: str | None = None
    """Whose errors S is measured against: a row of the suite; the challenge's baselines if there is none."""


def read_records(folder: Path) -> list[Record]:
    """Every record.json at any depth; two of the same run are refused."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give the one that `bitgraft bench` wrote its records to")
    records = [read_record(file) for file in sorted(folder.rglob(RECORD))]
    if not records:
        raise DataError(f"there is no {RECORD} in {folder} or below; `bitgraft bench` writes one for each run")
    seen: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (record.suite, record.backbone, record.row, record.dataset, record.seed)
        if key in seen:
            raise DataError(
                f"{seen[key].file} and {record.file} record the same run ({record.row} on {record.dataset}, seed "
                f"{record.seed}); remove one of them"
            )
        seen[key] = record
    return records


def read_record(file: Path) -> Record:
    content = _read(file)
    try:
        if content["format"] != FORMAT:
            raise DataError(f"{file} is a record of format {content['format']}, this bitgraft reads format {FORMAT}")
        return Record(
            file=file,
            **{name: _text(content, name) for name in ("suite", "row", "method", "dataset", "backbone")},
            title=str(content.get("title") or content["row"]),
            options=dict(content.get("options") or {}),
            seed=int(content["seed"]),
            config=dict(content.get("config") or {}),
            last=_accuracy(content, "last"),
            selected=_accuracy(content, "selected"),
            bits=_positive(content, "bits"),
            backbone_bits=_positive(content, "backbone_bits"),
            seconds=_optional(content, "seconds"),
            train_images_seen=None if (seen := _optional(content, "train_images_seen")) is None else int(seen),
            peak_memory=_optional(content, "peak_memory"),
            machine=dict(content.get("machine") or {}),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        if isinstance(problem, DataError):
            raise
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise DataError(f"{file} is no record of a run: {told}") from problem


def read_suites(folder: Path) -> dict[str, Suite]:
    """Every suite.json at any depth, by its name."""
    return {suite.name: suite for suite in map(read_suite, sorted(folder.rglob(SUITE)))}


def read_suite(file: Path) -> Suite:
    content = _read(file)
    try:
        form = content.get("form")
        if form not in (None, *FORMS):
            raise ValueError(f"its form is {form!r}, not one of {', '.join(FORMS)}")
        return Suite(
            name=_text(content, "name"),
            form=cast(Form | None, form),
            title=str(content.get("title") or content["name"]),
            rows={str(row["row"]): str(row.get("title") or row["row"]) for row in content.get("rows") or ()},
            datasets={str(one["name"]): str(one.get("title") or one["name"]) for one in content.get("datasets") or ()},
            baseline=content.get("baseline"),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise DataError(f"{file} does not describe a suite: {told}") from problem


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(f"cannot read {file}: {getattr(problem, 'strerror', None) or problem}") from problem
    if not isinstance(content, dict):
        raise DataError(f"cannot read {file}: it holds no JSON object")
    return content


def _text(content: Mapping[str, Any], name: str) -> str:
    if not isinstance(content[name], str) or not content[name]:
        raise ValueError(f"{name} is {content[name]!r}, not a name")
    return str(content[name])


def _accuracy(content: Mapping[str, Any], epoch: str) -> float | None:
    """The test accuracy there; none where there are no labels, or no validation to select by."""
    value = (content.get(epoch) or {}).get("test_accuracy")
    if value is None:
        return None
    if not 0 <= float(value) <= 1:
        raise ValueError(f"the test accuracy of {epoch} is {value}, not between 0 and 1")
    return float(value)


def _optional(content: Mapping[str, Any], name: str) -> float | None:
    return None if content.get(name) is None else _positive(content, name)


def _positive(content: Mapping[str, Any], name: str) -> float:
    value = float(content[name])
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}")
    return value

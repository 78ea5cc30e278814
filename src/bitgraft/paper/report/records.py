"""Records of runs, and what a suite says of the order and names of its tables.

`bitgraft bench` leaves a record.json for each run and a suite.json; a report gathers both in one records.jsonl, a line
each, which can be committed and is read as well.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from bitgraft.errors import DataError

FORMAT = 1
RECORD, SUITE, LINES = "record.json", "suite.json", "records.jsonl"
ORIGINAL = "original"
"""The row of the backbone on its own data, which is every row's there: nobody forgets."""
JOINT = "adapters-joint"
Form = Literal["accuracy", "decathlon", "ablation"]
FORMS = ("accuracy", "decathlon", "ablation")


@dataclass(frozen=True)
class Measured:
    """Accuracies of one epoch, from 0 to 1; none where there are no such images, or no labels."""

    test: float | None
    val: float | None


@dataclass(frozen=True)
class Record:
    """One run: a method on a data set with a seed."""

    where: str
    suite: str
    row: str
    title: str
    method: str
    joint: bool
    """Trained along with the backbone, which is another one then."""
    options: Mapping[str, Any]
    dataset: str
    seed: int
    backbone: str
    config: Mapping[str, Any]
    last: Measured
    selected: Measured
    """Of the epoch that was best on validation."""
    bits: float
    backbone_bits: float
    seconds: float | None
    """In training steps."""
    processor_seconds: float | None
    """The same without what other processes had of the machine."""
    train_images_seen: int | None
    peak_memory: float | None
    machine: Mapping[str, Any]
    content: Mapping[str, Any] = field(repr=False)
    """All of it, as it was read."""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.suite, self.backbone, self.row, self.dataset, self.seed


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

    def plain(self) -> dict[str, Any]:
        """For JSON; `read_suite` takes it."""
        return {
            "name": self.name,
            "title": self.title or self.name,
            "form": self.form,
            "baseline": self.baseline,
            "rows": [{"row": row, "title": title} for row, title in self.rows.items()],
            "datasets": [{"name": name, "title": title} for name, title in self.datasets.items()],
        }


def read_records(source: Path) -> list[Record]:
    """Every record of a folder, or of a file of lines; two different ones of the same run are refused."""
    found = [read_record(content, where) for where, content in _records_in(source)]
    if not found:
        raise DataError(f"there is no {RECORD} in {source} or below; `bitgraft bench` writes one for each run")
    seen: dict[tuple[Any, ...], Record] = {}
    for record in found:
        earlier = seen.setdefault(record.key, record)
        if earlier.content != record.content:
            raise DataError(
                f"{earlier.where} and {record.where} record the same run ({record.row} on {record.dataset}, seed "
                f"{record.seed}); remove one of them"
            )
    return list(seen.values())


def read_suites(source: Path) -> dict[str, Suite]:
    """Every description of a suite there, by its name."""
    found = [read_suite(content, where) for where, content in _suites_in(source)]
    return {suite.name: suite for suite in found}


def as_lines(records: Sequence[Record], suites: Mapping[str, Suite]) -> str:
    """The suites of these records and the records themselves, a line of JSON each, always in the same order."""
    about = [suites[name].plain() for name in sorted({record.suite for record in records} & set(suites))]
    runs = [record.content for record in sorted(records, key=lambda record: record.key)]
    lines = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) for line in [*about, *runs])
    return "".join(f"{line}\n" for line in lines)


def holds_record_files(source: Path) -> bool:
    return source.is_dir() and next(source.rglob(RECORD), None) is not None


def read_record(content: Mapping[str, Any], where: str) -> Record:
    try:
        if content["format"] != FORMAT:
            raise DataError(f"{where} is a record of format {content['format']}, this bitgraft reads format {FORMAT}")
        method = _text(content, "method")
        return Record(
            where=where,
            **{name: _text(content, name) for name in ("suite", "row", "dataset", "backbone")},
            method=method,
            joint=bool(content.get("joint", method == JOINT)),
            title=str(content.get("title") or content["row"]),
            options=dict(content.get("options") or {}),
            seed=int(content["seed"]),
            config=dict(content.get("config") or {}),
            last=_measured(content, "last"),
            selected=_measured(content, "selected"),
            bits=_positive(content, "bits"),
            backbone_bits=_positive(content, "backbone_bits"),
            seconds=_optional(content, "seconds"),
            processor_seconds=_optional(content, "processor_seconds"),
            train_images_seen=None if (seen := _optional(content, "train_images_seen")) is None else int(seen),
            peak_memory=_optional(content, "peak_memory"),
            machine=dict(content.get("machine") or {}),
            content=content,
        )
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        if isinstance(problem, DataError):
            raise
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise DataError(f"{where} is no record of a run: {told}") from problem


def read_suite(content: Mapping[str, Any], where: str) -> Suite:
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
        raise DataError(f"{where} does not describe a suite: {told}") from problem


Found = Iterator[tuple[str, dict[str, Any]]]
"""Where something stands, and its content."""


def _records_in(source: Path) -> Found:
    if holds_record_files(source):
        return ((str(file), _parsed(_read(file), str(file))) for file in sorted(source.rglob(RECORD)))
    return (line for line in _lines_in(source) if "row" in line[1])


def _suites_in(source: Path) -> Found:
    if holds_record_files(source):
        return ((str(file), _parsed(_read(file), str(file))) for file in sorted(source.rglob(SUITE)))
    return (line for line in _lines_in(source) if "row" not in line[1])


def _lines_in(source: Path) -> Found:
    """Of a file, or of those in a folder that holds no record.json: what a report writes beside them is a copy."""
    if not source.exists():
        raise DataError(
            f"there is no folder or file {source}; give the folder that `bitgraft bench` wrote its records to"
        )
    for file in [source] if source.is_file() else sorted(source.rglob(LINES)):
        for number, line in enumerate(_read(file).splitlines(), 1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, _parsed(line, where)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise DataError(f"cannot read {file}: {problem.strerror}") from problem


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"cannot read {where}: {problem}") from problem
    if not isinstance(content, dict):
        raise DataError(f"cannot read {where}: it holds no JSON object")
    return content


def _text(content: Mapping[str, Any], name: str) -> str:
    if not isinstance(content[name], str) or not content[name]:
        raise ValueError(f"{name} is {content[name]!r}, not a name")
    return str(content[name])


def _measured(content: Mapping[str, Any], epoch: str) -> Measured:
    return Measured(*(_accuracy(content, epoch, part) for part in ("test", "val")))


def _accuracy(content: Mapping[str, Any], epoch: str, part: str) -> float | None:
    value = (content.get(epoch) or {}).get(f"{part}_accuracy")
    if value is None:
        return None
    if not 0 <= float(value) <= 1:
        raise ValueError(f"the {part} accuracy of {epoch} is {value}, not between 0 and 1")
    return float(value)


def _optional(content: Mapping[str, Any], name: str) -> float | None:
    return None if content.get(name) is None else _positive(content, name)


def _positive(content: Mapping[str, Any], name: str) -> float:
    value = float(content[name])
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}")
    return value

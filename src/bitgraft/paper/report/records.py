"""Read records of runs, as `bitgraft bench` writes them (record.json, suite.json) or as reports do (records.jsonl)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bitgraft.errors import DataError
from bitgraft.paper.from_dict import from_dict

FORMAT = 1
RECORD, SUITE, LINES = "record.json", "suite.json", "records.jsonl"
ORIGINAL = "original"
"""Row name of the backbone evaluated on its own data."""
Form = Literal["accuracy", "decathlon", "ablation"]
RENAMED = {
    "follow": "scale_k2_by_r",
    "centre": "gradient_centralization",
    "level": "mean_shift_correction",
    "steady": "clip_to_ema_norm",
    "head_start": "head_init",
    "shift": "k1",
}
"""Settings and roles that have been renamed since the first records were written."""
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Accuracies of one epoch, from 0 to 1; None if the split has no images or no labels."""

    test_accuracy: float | None = None
    val_accuracy: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, not between 0 and 1")


@dataclass(frozen=True)
class Record:
    """One run: a method on a data set with a seed."""

    format: int
    suite: str
    row: str
    method: str
    dataset: str
    seed: int
    backbone: str
    bits: float
    backbone_bits: float
    title: str = ""
    joint: bool = False
    """The backbone was trained as well, so this run does not share it with the others."""
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    last: Measured = Measured()
    selected: Measured = Measured()
    """Of the epoch with the best validation accuracy."""
    bits_per_weight: float | None = None
    """Size of the task file without its head, per weight that a task can transform; older records lack it."""
    seconds: float | None = None
    """Wall-clock time spent in training steps."""
    processor_seconds: float | None = None
    train_images_seen: int | None = None
    peak_memory: float | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    where: str = ""
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The JSON object that was read."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it has format {self.format}, but this version reads format {FORMAT}")
        for name, value in vars(self).items():
            if type(value) in (int, float) and name != "seed" and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}")

    def per_image(self, seconds: float | None) -> float | None:
        """Convert seconds of training to milliseconds per image."""
        return 1000 * seconds / self.train_images_seen if seconds is not None and self.train_images_seen else None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.suite, self.backbone, self.row, self.dataset, self.seed


@dataclass(frozen=True)
class RowTitle:
    row: str
    title: str = ""


@dataclass(frozen=True)
class DatasetTitle:
    name: str
    title: str = ""


@dataclass(frozen=True)
class Suite:
    """Order and titles of rows and data sets in tables; unlisted ones come last, sorted by name."""

    name: str
    title: str = ""
    form: Form | None = None
    baseline: str | None = None
    """The row whose errors define S; by default the challenge's baselines."""
    rows: tuple[RowTitle, ...] = ()
    datasets: tuple[DatasetTitle, ...] = ()


def read_records(source: Path) -> list[Record]:
    """Read all records in a folder or a records.jsonl file.

    Raises:
        DataError: two records of one run differ, or there is none.
    """
    seen: dict[tuple[Any, ...], Record] = {}
    for where, content in _contents(source, RECORD):
        record = _built(Record, {**content, "where": where, "content": content}, where, "a record of a run")
        earlier = seen.setdefault(record.key, record)
        if earlier.content != record.content:
            raise DataError(
                f"{earlier.where} and {record.where} record the same run ({record.row} on {record.dataset}, seed "
                f"{record.seed}) with different results; delete one of them"
            )
    if not seen:
        raise DataError(f"there is no {RECORD} in {source} or its subfolders; `bitgraft bench` writes one per run")
    return list(seen.values())


def read_suites(source: Path) -> dict[str, Suite]:
    """Read the suites' descriptions, by name."""
    found = [_built(Suite, content, where, "a description of a suite") for where, content in _contents(source, SUITE)]
    return {suite.name: suite for suite in found}


def as_lines(records: Sequence[Record], suites: Mapping[str, Suite]) -> str:
    """Return the suites and the records as JSON lines in a fixed order."""
    about = [asdict(suites[name]) for name in sorted({record.suite for record in records} & set(suites))]
    runs = [record.content for record in sorted(records, key=lambda record: record.key)]
    lines = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) for line in [*about, *runs])
    return "".join(f"{line}\n" for line in lines)


def holds_record_files(source: Path) -> bool:
    return source.is_dir() and next(source.rglob(RECORD), None) is not None


def current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's training settings under their current names."""
    return {
        RENAMED.get(name, name): current_names(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
    }


def _built(kind: type[T], content: Mapping[str, Any], where: str, what: str) -> T:
    try:
        return from_dict(kind, content, ignore_unknown=True)
    except ValueError as fault:
        raise DataError(f"{where} is not {what}: {fault}") from fault


def _contents(source: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the JSON object of each record or suite; record.json files win over a records.jsonl."""
    if not source.exists():
        raise DataError(
            f"there is no folder or file {source}; give the run folder of `bitgraft bench`, or a records.jsonl"
        )
    pattern = name if holds_record_files(source) else LINES
    for file in [source] if source.is_file() else sorted(source.rglob(pattern)):
        try:
            text = file.read_bytes()
        except OSError as problem:
            raise DataError(f"cannot read {file}: {problem.strerror}") from problem
        whole, lines = file.name == name, enumerate(text.splitlines(), 1)
        for where, part in [(str(file), text)] if whole else [(f"{file}, line {n}", line) for n, line in lines if line]:
            try:
                content = json.loads(part)
            except (ValueError, RecursionError) as problem:
                raise DataError(f"cannot read {where}: {problem}") from problem
            if not isinstance(content, dict):
                raise DataError(f"cannot read {where}: it is not a JSON object")
            if whole or ("row" in content) == (name == RECORD):
                yield where, content

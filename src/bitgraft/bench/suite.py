"""A benchmark as data: which data sets, which backbone, which protocol, which rows, which seeds. One TOML file."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.methods import registry
from bitgraft.task import check_name
from bitgraft.training.config import Config, preset

SPLITS = ("train", "val", "test")
ORIGINAL = "original"
"""The row of the backbone's own data, which is every row's: nobody forgets."""


@dataclass(frozen=True)
class Dataset:
    """One column of the table."""

    name: str
    data: str
    """As `bitgraft.open_data` takes it; relative folders start at the suite's root."""
    title: str = ""
    images: Mapping[str, int] = field(default_factory=dict)
    """How many there must be in each split."""
    classes: int | None = None
    source: str = ""
    """Where it comes from, and what is to be done to get it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Published ones, "md5:..." or "sha256:...", by file below the root."""
    val_share: float = 0.1
    """What is held back for validation where there is no such split."""
    original: bool = False
    """The backbone's own data: tried, not trained on."""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    row: str
    method: str
    title: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    """In which order tasks are added, where that matters (PackNet)."""
    seeds: tuple[int, ...] | None = None
    datasets: tuple[str, ...] | None = None
    """Only these, where a row is not for all."""


@dataclass(frozen=True)
class Backbone:
    name: str
    weights: str | None = None
    pretrained: bool = True


@dataclass(frozen=True)
class Suite:
    name: str
    backbone: Backbone
    datasets: tuple[Dataset, ...]
    rows: tuple[Row, ...]
    title: str = ""
    form: Literal["accuracy", "decathlon", "ablation"] = "accuracy"
    preset: str = "quick"
    seeds: tuple[int, ...] = (0,)
    config: Mapping[str, Any] = field(default_factory=dict)

    def dataset(self, name: str) -> Dataset:
        return next(dataset for dataset in self.datasets if dataset.name == name)

    def row(self, name: str) -> Row:
        return next((row for row in self.rows if row.row == name), Row(ORIGINAL, "classifier", title="Original"))

    def config_of(self, row: Row, dataset: Dataset, seed: int) -> Config:
        """The protocol, then what the suite, the data set and the row change; the last word is the row's."""
        config = preset(self.preset, row.method)
        for changes in (self.config, dataset.config, row.config):
            config = config.changed(**changes)
        return config.changed(seed=seed)

    def cells(self) -> Iterator["Cell"]:
        """All the runs, in the order in which they are best made: a row's chain or joint run is one of them."""
        for row in self.rows:
            trained = [dataset.name for dataset in self.datasets if not dataset.original]
            names = [name for name in trained if row.datasets is None or name in row.datasets]
            method = registry.get(row.method)
            groups = [row.order or tuple(names)] if method.leans or method.joint else [(name,) for name in names]
            for seed in row.seeds if row.seeds is not None else self.seeds:
                yield from (Cell(row.row, seed, tuple(group)) for group in groups)
        for dataset in self.datasets:
            if dataset.original:
                yield Cell(ORIGINAL, 0, (dataset.name,))

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = (), datasets: Sequence[str] = ()) -> "Suite":
        """The same with some of its rows, seeds or data sets alone."""
        for kind, wanted, known in (
            ("row", rows, [row.row for row in self.rows]),
            ("data set", datasets, [dataset.name for dataset in self.datasets]),
        ):
            if strange := [name for name in wanted if name not in known]:
                raise SuiteError(f"suite {self.name} has no {kind} {strange[0]!r}; it has {', '.join(known)}")
        kept = tuple(d for d in self.datasets if not datasets or d.name in datasets)
        names = {d.name for d in kept}
        return replace(
            self,
            seeds=tuple(seeds) or self.seeds,
            datasets=kept,
            rows=tuple(
                replace(
                    row,
                    seeds=tuple(seeds) or row.seeds,
                    order=tuple(name for name in row.order if name in names),
                    datasets=row.datasets and tuple(name for name in row.datasets if name in names),
                )
                for row in self.rows
                if not rows or row.row in rows
            ),
        )


@dataclass(frozen=True)
class Cell:
    """One run: a row, a seed and a data set, or several where they are one run (PackNet's chain, joint training)."""

    row: str
    seed: int
    datasets: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.row}, {'+'.join(self.datasets)}, seed {self.seed}"


def built_in() -> list[str]:
    folder = resources.files("bitgraft.bench") / "suites"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_suite(name: str | Path) -> Suite:
    """A suite by the name of one of ours, or from a TOML file."""
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in built_in():
            close = difflib.get_close_matches(str(name), built_in(), 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SuiteError(
                f"there is no suite {str(name)!r}; {hint}known are {', '.join(built_in())}, or a .toml file"
            )
        text = (resources.files("bitgraft.bench") / "suites" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as cause:
            raise SuiteError(f"cannot read the suite {path}: {cause.strerror}") from cause
    try:
        return parse(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, SuiteError) as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault


def parse(content: Mapping[str, Any]) -> Suite:
    tables = {
        "backbone": _made(Backbone, content.get("backbone", {}), "[backbone]"),
        "datasets": _several(Dataset, content, "datasets"),
        "rows": _several(Row, content, "rows"),
    }
    suite: Suite = _made(Suite, {**content, **tables}, "the file")
    _check(suite)
    return suite


def _several(kind: type[Any], content: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    return tuple(_made(kind, table, f"[[{name}]] {number}") for number, table in enumerate(content.get(name, []), 1))


def _made(kind: type[Any], given: Any, where: str) -> Any:
    """A dataclass from a table of the file; what is missing or unknown is said by name."""
    if not isinstance(given, Mapping):
        raise SuiteError(f"{where} must be a table")
    known = {f.name for f in fields(kind)}
    if strange := sorted(set(given) - known):
        close = difflib.get_close_matches(strange[0], known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
        raise SuiteError(f"{where} has no setting {strange[0]!r}; {hint}")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    except TypeError as fault:
        missing = str(fault).partition("argument")[2].partition(":")[2].strip()
        raise SuiteError(f"{where} lacks {missing or fault}") from fault


def _check(suite: Suite) -> None:
    """All that can be known to be wrong before the first run."""
    if not suite.datasets or not suite.rows:
        raise SuiteError("it needs at least one of [[datasets]] and of [[rows]]")
    names = [dataset.name for dataset in suite.datasets]
    for what, labels in (("data set", names), ("row", [row.row for row in suite.rows])):
        for label in labels:
            try:
                check_name(label)
            except BitgraftError as fault:
                raise SuiteError(f"the {what} {label!r} is a folder's name, too: {fault}") from fault
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise SuiteError(f"two of the {what}s are called {twice[0]!r}")
    for dataset in suite.datasets:
        if strange := set(dataset.images) - set(SPLITS):
            raise SuiteError(f"data set {dataset.name}: images are those of {', '.join(SPLITS)}, not {min(strange)!r}")
    for row in suite.rows:
        if strange := set(row.order + (row.datasets or ())) - set(names):
            raise SuiteError(f"row {row.row}: there is no data set {min(strange)!r}; known are {', '.join(names)}")
        try:
            registry.get(row.method).with_options(row.options)
            for dataset in suite.datasets:
                suite.config_of(row, dataset, 0)
        except BitgraftError as fault:
            raise SuiteError(f"row {row.row}: {fault}") from fault


def on_backbone(suite: Suite, name: str, weights: str | None, pretrained: bool) -> Suite:
    """The same with another backbone."""
    return replace(suite, backbone=Backbone(name, weights, pretrained))


def on_all_labels(suite: Suite) -> Suite:
    """Devkit domains with val joined to train, for the final submission."""
    datasets = [replace(d, data=f"{d.data}:train+val", images=_joined(d.images)) for d in suite.datasets]
    return replace(suite, datasets=tuple(datasets))


def _joined(images: Mapping[str, int]) -> dict[str, int]:
    if "train" not in images or "val" not in images:
        return {}
    return {**images, "train": images["train"] + images["val"], "val": 0}


def settings(suite: Suite, row: Row, dataset: Dataset) -> dict[str, Any]:
    """What has a say in a record's figures, the configuration apart."""
    return {
        "backbone": asdict(suite.backbone),
        "method": row.method,
        "options": dict(row.options),
        "order": list(row.order),
        "data": dataset.data,
        "val_share": dataset.val_share,
    }

"""A benchmark as data: which data sets, which backbone, which protocol, which rows, which seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bitgraft.errors import SuiteError
from bitgraft.methods import registry
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.training.config import Config
from bitgraft.training.presets import preset

SPLITS = ("train", "val", "test")


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
    """Published ones, "md5:..." or "sha256:...", by file below the root; checked where the file is still there."""
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
    """Only these, where a row is not for all; a joint row may train on the backbone's own data, too."""

    def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """These in the row's order; what it does not name comes last."""
        named = [name for name in self.order if name in names]
        return (*named, *(name for name in names if name not in named))


@dataclass(frozen=True)
class Backbone:
    name: str
    weights: str | None = None
    pretrained: bool = True
    trained_on: str | None = None
    """The data set that all of it is first trained on, starting from the above; it is the backbone's own then."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """For that training."""


@dataclass(frozen=True)
class Suite:
    name: str
    backbone: Backbone
    datasets: tuple[Dataset, ...]
    rows: tuple[Row, ...]
    title: str = ""
    form: Literal["accuracy", "decathlon", "ablation"] = "accuracy"
    baseline: str | None = None
    """The row whose errors S is measured against, in the decathlon's form; by default the challenge's own."""
    preset: str = "quick"
    seeds: tuple[int, ...] = (0,)
    config: Mapping[str, Any] = field(default_factory=dict)

    def dataset(self, name: str) -> Dataset:
        return next(dataset for dataset in self.datasets if dataset.name == name)

    def row(self, name: str) -> Row:
        if name == ORIGINAL:
            method = "classifier" if self.backbone.trained_on is None else "finetune"
            return Row(ORIGINAL, method, title="Original", config=self.backbone.config)
        return next(row for row in self.rows if row.row == name)

    def config_of(self, row: Row, dataset: Dataset, seed: int) -> Config:
        """The protocol, then what the suite, the data set and the row change; the last word is the row's."""
        config = preset(self.preset, row.method)
        for changes in (self.config, dataset.config, row.config):
            config = config.changed(**changes)
        return config.changed(seed=seed)

    def cells(self) -> Iterator["Cell"]:
        """All the runs, in the order in which they are best made: a row's chain or joint run is one of them."""
        own = [Cell(ORIGINAL, 0, (dataset.name,)) for dataset in self.datasets if dataset.original]
        yield from filter(self.leads, own)
        for row in self.rows:
            names = [dataset.name for dataset in self.datasets if _is_for(row, dataset)]
            method = registry.get(row.method)
            groups = [row.ordered(names)] if method.depends_on_previous or method.joint else [(name,) for name in names]
            for seed in row.seeds if row.seeds is not None else self.seeds:
                yield from (Cell(row.row, seed, tuple(group)) for group in groups if group)
        yield from (cell for cell in own if not self.leads(cell))

    def leads(self, cell: "Cell") -> bool:
        """Whether the other runs wait for this one: it trains their backbone."""
        return cell.row == ORIGINAL and self.backbone.trained_on in cell.datasets

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = (), datasets: Sequence[str] = ()) -> "Suite":
        """The same with some of its rows, seeds or data sets alone."""
        for kind, wanted, known in (
            ("row", rows, [row.row for row in self.rows]),
            ("data set", datasets, [dataset.name for dataset in self.datasets]),
        ):
            if strange := [name for name in wanted if name not in known]:
                raise SuiteError(f"suite {self.name} has no {kind} {strange[0]!r}; it has {', '.join(known)}")
        kept = tuple(
            d for d in self.datasets if not datasets or d.name in datasets or d.name == self.backbone.trained_on
        )
        names = {d.name for d in kept}
        return replace(
            self,
            baseline=self.baseline if not rows or self.baseline in rows else None,
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


def _is_for(row: Row, dataset: Dataset) -> bool:
    """Whether a row trains on a data set; on the backbone's own only if the row names it."""
    return not dataset.original if row.datasets is None else dataset.name in row.datasets


def on_backbone(suite: Suite, name: str, weights: str | None, pretrained: bool) -> Suite:
    """The same with another backbone; where the suite trains it first and there are no weights, so it does this one."""
    if suite.backbone.trained_on is not None and weights is None:
        return replace(suite, backbone=replace(suite.backbone, name=name))
    return replace(suite, backbone=Backbone(name, weights, pretrained))


def on_all_labels(suite: Suite) -> Suite:
    """Devkit domains with val joined to train, for the final submission; the backbone's own stays to be tried on."""
    datasets = [
        d if d.original else replace(d, data=f"{d.data}:train+val", images=_joined(d.images)) for d in suite.datasets
    ]
    return replace(suite, datasets=tuple(datasets))


def _joined(images: Mapping[str, int]) -> dict[str, int]:
    if "train" not in images or "val" not in images:
        return {}
    return {**images, "train": images["train"] + images["val"], "val": 0}


def settings(suite: Suite, row: Row, dataset: Dataset) -> dict[str, Any]:
    """What has a say in a record's figures, the configuration apart."""
    later = ("trained_on", "config")  # which most suites do not set, and older records do not have
    backbone = {name: value for name, value in asdict(suite.backbone).items() if value or name not in later}
    return {
        "backbone": backbone,
        "method": row.method,
        "options": dict(row.options),
        "order": list(row.order),
        "data": dataset.data,
        "val_share": dataset.val_share,
    }

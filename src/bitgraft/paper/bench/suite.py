"""A benchmark suite as dataclasses: data sets, a backbone, a protocol, rows and seeds."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bitgraft.errors import SuiteError
from bitgraft.methods import registry
from bitgraft.paper.report.records import ORIGINAL, Form
from bitgraft.training.config import Config
from bitgraft.training.presets import preset

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Dataset:
    """One column of the table."""

    name: str
    data: str
    """The argument of `bitgraft.open_data`; relative folders start at the suite's root."""
    title: str = ""
    images: Mapping[str, int] = field(default_factory=dict)
    """Expected number of images per split."""
    classes: int | None = None
    source: str = ""
    """Where to download it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Published checksums, "md5:..." or "sha256:...", by file relative to the root; checked if the file exists."""
    val_share: float = 0.1
    """Share held out for validation if there is no validation split."""
    original: bool = False
    """The backbone's own data: evaluated, not trained on."""
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
    """The order in which tasks are added, for methods that depend on it (PackNet)."""
    seeds: tuple[int, ...] | None = None
    datasets: tuple[str, ...] | None = None
    """Only these data sets; a joint row may include the backbone's own."""

    def trains_on(self, dataset: Dataset) -> bool:
        return not dataset.original if self.datasets is None else dataset.name in self.datasets


@dataclass(frozen=True)
class Backbone:
    name: str
    weights: str | None = None
    pretrained: bool = True
    trained_on: str | None = None
    """First train the whole network on this data set, which becomes the backbone's own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Training settings of the backbone."""


@dataclass(frozen=True)
class Cell:
    """One run: a row, a seed, and one data set, or several for PackNet's chain and joint training."""

    row: str
    seed: int
    datasets: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.row}, {'+'.join(self.datasets)}, seed {self.seed}"


@dataclass(frozen=True)
class Suite:
    name: str
    backbone: Backbone
    datasets: tuple[Dataset, ...]
    rows: tuple[Row, ...]
    title: str = ""
    form: Form = "accuracy"
    baseline: str | None = None
    """The row whose errors define the decathlon score S; by default the challenge's baselines."""
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

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.seeds if row.seeds is None else row.seeds))

    def config_of(self, row: Row, dataset: Dataset, seed: int) -> Config:
        """Return the preset, overridden by the suite, then the data set, then the row."""
        config = preset(self.preset, row.method)
        for changes in (self.config, dataset.config, row.config):
            config = config.changed(**changes)
        return config.changed(seed=seed)

    def cells(self) -> Iterator[Cell]:
        """Yield all runs in order; a PackNet chain or joint training is one run."""
        own = [Cell(ORIGINAL, 0, (dataset.name,)) for dataset in self.datasets if dataset.original]
        yield from filter(self.trains_backbone, own)
        for row in self.rows:
            names = [dataset.name for dataset in self.datasets if row.trains_on(dataset)]
            method, ordered = registry.get(row.method), [name for name in row.order if name in names]
            together = [*ordered, *(name for name in names if name not in ordered)]
            groups = [together] if method.depends_on_previous or method.joint else [[name] for name in names]
            for seed in self.seeds_of(row):
                yield from (Cell(row.row, seed, tuple(group)) for group in groups if group)
        yield from (cell for cell in own if not self.trains_backbone(cell))

    def trains_backbone(self, cell: Cell) -> bool:
        """Return whether this run trains the backbone, which all other runs then wait for."""
        return cell.row == ORIGINAL and self.backbone.trained_on in cell.datasets

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = (), datasets: Sequence[str] = ()) -> "Suite":
        """Return the suite with only some of its rows, seeds or data sets."""
        known = {"row": [row.row for row in self.rows], "data set": [dataset.name for dataset in self.datasets]}
        for kind, wanted in (("row", rows), ("data set", datasets)):
            if unknown := [name for name in wanted if name not in known[kind]]:
                raise SuiteError(f"suite {self.name} has no {kind} {unknown[0]!r}; it has {', '.join(known[kind])}")
        names = {*datasets, self.backbone.trained_on} if datasets else set(known["data set"])
        kept = [row for row in self.rows if not rows or row.row in rows]
        return replace(
            self,
            baseline=self.baseline if not rows or self.baseline in rows else None,
            seeds=tuple(seeds) or self.seeds,
            datasets=tuple(dataset for dataset in self.datasets if dataset.name in names),
            rows=tuple(replace(row, seeds=tuple(seeds) or row.seeds, **narrowed(vars(row), names)) for row in kept),
        )


def narrowed(row: Mapping[str, Any], names: Collection[str | None]) -> dict[str, Any]:
    """Return the row's `order` and `datasets`, limited to these names."""
    return {part: tuple(n for n in row[part] if n in names) for part in ("order", "datasets") if row.get(part)}


def on_backbone(suite: Suite, name: str, weights: str | None, pretrained: bool) -> Suite:
    """Return the suite with another backbone; one with `trained_on` trains it first, unless weights are given."""
    if suite.backbone.trained_on is not None and weights is None:
        return replace(suite, backbone=replace(suite.backbone, name=name))
    return replace(suite, backbone=Backbone(name, weights, pretrained))


def on_all_labels(suite: Suite) -> Suite:
    """Join val to train in every devkit domain, for the final submission; the backbone's own data stay as they are."""

    def joined(dataset: Dataset) -> Dataset:
        images = dataset.images
        both = {"train": images["train"] + images["val"], "val": 0} if {"train", "val"} <= set(images) else {}
        return replace(dataset, data=f"{dataset.data}:train+val", images={**images, **both} if both else {})

    return replace(suite, datasets=tuple(d if d.original else joined(d) for d in suite.datasets))


def settings(suite: Suite, row: Row, dataset: Dataset) -> dict[str, Any]:
    """Return all settings that affect a result, except the training configuration."""
    later = ("trained_on", "config")  # older records lack them
    backbone = {name: value for name, value in asdict(suite.backbone).items() if value or name not in later}
    return {
        "backbone": backbone,
        "method": row.method,
        "options": dict(row.options),
        "order": list(row.order),
        "data": dataset.data,
        "val_share": dataset.val_share,
    }

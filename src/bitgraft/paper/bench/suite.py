"""A benchmark as data: data sets, a backbone, a protocol, rows and seeds."""

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
    """As `bitgraft.open_data` takes it; relative folders start at the suite's root."""
    title: str = ""
    images: Mapping[str, int] = field(default_factory=dict)
    """The number that each split must have."""
    classes: int | None = None
    source: str = ""
    """Where it comes from, and how to get it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Published ones, "md5:..." or "sha256:...", by file below the root; checked where the file is still there."""
    val_share: float = 0.1
    """Held back for validation where there is no such split."""
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
    """The order in which tasks are added, where that matters (PackNet)."""
    seeds: tuple[int, ...] | None = None
    datasets: tuple[str, ...] | None = None
    """Only these; a joint row may name the backbone's own data, too."""

    def trains_on(self, dataset: Dataset) -> bool:
        """On the backbone's own data only if the row names them."""
        return not dataset.original if self.datasets is None else dataset.name in self.datasets


@dataclass(frozen=True)
class Backbone:
    name: str
    weights: str | None = None
    pretrained: bool = True
    trained_on: str | None = None
    """First train the whole network on this data set, which then is the backbone's own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """For that training."""


@dataclass(frozen=True)
class Cell:
    """One run: a row, a seed and a data set, or several where they are one run (PackNet's chain, joint training)."""

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

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds if row.seeds is None else row.seeds

    def config_of(self, row: Row, dataset: Dataset, seed: int) -> Config:
        """The preset, then what the suite, the data set and last the row change."""
        config = preset(self.preset, row.method)
        for changes in (self.config, dataset.config, row.config):
            config = config.changed(**changes)
        return config.changed(seed=seed)

    def cells(self) -> Iterator[Cell]:
        """All runs in the order to make them; a row's chain or joint training is one run."""
        own = [Cell(ORIGINAL, 0, (dataset.name,)) for dataset in self.datasets if dataset.original]
        yield from filter(self.leads, own)
        for row in self.rows:
            names = [dataset.name for dataset in self.datasets if row.trains_on(dataset)]
            method, ordered = registry.get(row.method), [name for name in row.order if name in names]
            together = [*ordered, *(name for name in names if name not in ordered)]
            groups = [together] if method.depends_on_previous or method.joint else [[name] for name in names]
            for seed in self.seeds_of(row):
                yield from (Cell(row.row, seed, tuple(group)) for group in groups if group)
        yield from (cell for cell in own if not self.leads(cell))

    def leads(self, cell: Cell) -> bool:
        """Whether the other runs wait for this one, which trains their backbone."""
        return cell.row == ORIGINAL and self.backbone.trained_on in cell.datasets

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = (), datasets: Sequence[str] = ()) -> "Suite":
        """The same with only some of its rows, seeds or data sets."""
        known = {"row": [row.row for row in self.rows], "data set": [dataset.name for dataset in self.datasets]}
        for kind, wanted in (("row", rows), ("data set", datasets)):
            if strange := [name for name in wanted if name not in known[kind]]:
                raise SuiteError(f"suite {self.name} has no {kind} {strange[0]!r}; it has {', '.join(known[kind])}")
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
    """What a row says of data sets, without those that are not among the names."""
    return {part: tuple(n for n in row[part] if n in names) for part in ("order", "datasets") if row.get(part)}


def on_backbone(suite: Suite, name: str, weights: str | None, pretrained: bool) -> Suite:
    """The same with another backbone; a suite that trains its backbone first does so unless there are weights."""
    if suite.backbone.trained_on is not None and weights is None:
        return replace(suite, backbone=replace(suite.backbone, name=name))
    return replace(suite, backbone=Backbone(name, weights, pretrained))


def on_all_labels(suite: Suite) -> Suite:
    """Devkit domains with val joined to train, for the final submission; the backbone's own data stay as they are."""

    def joined(dataset: Dataset) -> Dataset:
        images = dataset.images
        both = {"train": images["train"] + images["val"], "val": 0} if {"train", "val"} <= set(images) else {}
        return replace(dataset, data=f"{dataset.data}:train+val", images={**images, **both} if both else {})

    return replace(suite, datasets=tuple(d if d.original else joined(d) for d in suite.datasets))


def settings(suite: Suite, row: Row, dataset: Dataset) -> dict[str, Any]:
    """What determines a record's figures, apart from the configuration."""
    later = ("trained_on", "config")  # older records do not have them
    backbone = {name: value for name, value in asdict(suite.backbone).items() if value or name not in later}
    return {
        "backbone": backbone,
        "method": row.method,
        "options": dict(row.options),
        "order": list(row.order),
        "data": dataset.data,
        "val_share": dataset.val_share,
    }

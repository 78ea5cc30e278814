"""A data set before any image is decoded: files or arrays, labels, classes and splits."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from bitgraft.data.decode import ArrayImages
from bitgraft.data.seeded import check_shares, stratified_split
from bitgraft.errors import DataError

UNLABELLED = -1
FEW = 5  # warn if a class has fewer training images


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Labelled images that are decoded on access."""

    source: Any
    """Paths, a numpy or torch array, or a sequence of paths, PIL images or arrays."""
    labels: tuple[int, ...]
    """The class index of each image, -1 if unknown."""
    ids: tuple[int, ...] | None = None
    """The devkit's image ids, for a submission."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", _as_source(self.source))
        object.__setattr__(self, "labels", tuple(map(int, self.labels)))
        for name, values in (("labels", self.labels), ("ids", self.ids)):
            if values is not None and len(values) != len(self.source):
                raise DataError(f"{len(self.source)} images have {len(values)} {name}: pass one per image")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Images({len(self)})"

    @property
    def files(self) -> tuple[Path, ...] | None:
        """The paths, if the images are files."""
        return self.source if isinstance(self.source, tuple) else None

    def pick(self, positions: Sequence[int]) -> "Images":
        files = self.files
        return Images(
            source=Subset(self.source, positions) if files is None else tuple(files[i] for i in positions),
            labels=tuple(self.labels[i] for i in positions),
            ids=None if self.ids is None else tuple(self.ids[i] for i in positions),
        )

    def without(self, bad: Collection[tuple[Path, str]]) -> "Images":
        """Return the images without those that `find_bad` found."""
        paths = {path for path, _ in bad}
        return self.pick([i for i, path in enumerate(self.files) if path not in paths]) if self.files else self

    def __add__(self, other: "Images") -> "Images":
        if self.files is None or other.files is None:
            raise DataError("only image files can be joined, not arrays")
        ids = None if self.ids is None or other.ids is None else self.ids + other.ids
        return Images(self.files + other.files, self.labels + other.labels, ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """A data set: its classes, and its training, validation and test images."""

    name: str
    classes: tuple[str, ...]
    train: Images
    val: Images | None = None
    test: Images | None = None
    flip: bool = True
    """Whether a flipped image keeps its class. Digits, letters and signs do not."""
    category_ids: tuple[int, ...] | None = None
    """The devkit's id of each class, for a submission."""
    skipped: tuple[tuple[Path, str], ...] = field(default=(), repr=False)
    """Unreadable files that were left out, and the reasons."""

    def __post_init__(self) -> None:
        if not len(self.train):
            raise DataError(f"{self.name}: there is no training image")
        for part, images in (("train", self.train), ("val", self.val), ("test", self.test)):
            lowest, count = UNLABELLED if part == "test" else 0, len(self.classes)
            labels = images.labels if images else ()
            if outside := [i for i, label in enumerate(labels) if not lowest <= label < count]:
                which = images.files[outside[0]] if images and images.files else f"image {outside[0]}"
                raise DataError(
                    f"{self.name}, {part}: {len(outside)} of {len(labels)} labels are not between 0 and {count - 1}, "
                    f"the first is {labels[outside[0]]} of {which}"
                )

    def hold_out(self, val_share: float, test_share: float, seed: int) -> "Splits":
        """Take missing val and test splits from the training images, at random by the seed."""
        check_shares(val_share, test_share)
        train, val, test = stratified_split(
            self.train.labels, 0.0 if self.val else val_share, 0.0 if self.test else test_share, seed
        )
        return replace(
            self,
            train=self.train.pick(train),
            val=self.val or (self.train.pick(val) if val else None),
            test=self.test or (self.train.pick(test) if test else None),
        )

    def labelled(self, part: str, classes: Sequence[str], whose: str, choice: str = 'split="{}"') -> Images:
        """Return a split's images with the numbers that its classes have among these, matched by name.

        Messages say `whose` classes these are, and how the user makes another `choice` of split.
        """
        images: Images | None = getattr(self, part)
        if not images:
            others = " or ".join(choice.format(name) for name in ("train", "val", "test") if getattr(self, name))
            raise DataError(f"{self.name} has no {part} images: choose {others}")
        if min(images.labels) < 0:
            raise DataError(f"the {part} images of {self.name} have no labels, so accuracy cannot be measured on them")
        present = [self.classes[label] for label in sorted(set(images.labels))]
        if unknown := [name for name in present if name not in classes]:
            raise DataError(
                f"{whose} does not know {len(unknown)} of the {len(present)} classes in the data: {few(unknown)}; "
                f"it knows {few(classes) or 'none'}"
            )
        numbers = {name: number for number, name in enumerate(classes)}
        return replace(images, labels=tuple(numbers[self.classes[label]] for label in images.labels))

    @property
    def tested(self) -> Images | None:
        """The test images if they have labels."""
        return self.test if self.test and min(self.test.labels) > UNLABELLED else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that make training worse, but not impossible."""
        found, total = [], len(self.classes)
        for images, part, meanings in (
            (self.train, "training", ("it cannot be learned", "they cannot be learned")),
            (self.val, "validation", ("validation says nothing about it", "validation says nothing about them")),
        ):
            present = set(images.labels if images else range(total))
            if missing := [name for label, name in enumerate(self.classes) if label not in present]:
                meaning = meanings[len(missing) > 1]
                found.append(f"{len(missing)} of {total} classes have no {part} image, so {meaning}: {few(missing)}")
        counts = Counter(self.train.labels)
        if small := [name for label, name in enumerate(self.classes) if 0 < counts[label] < FEW]:
            found.append(
                f"{len(small)} of {total} classes have fewer than {FEW} training images, too few to learn them well: "
                f"{few(small)}"
            )
        if self.val and len(self.val) < 2 * total:
            found.append(
                f"a validation set of {len(self.val)} for {total} classes is small: its accuracy is noisy, and so is "
                "the choice of the best epoch"
            )
        return tuple(found)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Make class names unique by adding the label to repeated ones."""
    counts = Counter(names)
    return tuple(f"{name} ({label})" if counts[name] > 1 else name for label, name in enumerate(names))


def few(names: Sequence[Any], count: int = 5) -> str:
    """Join the first few names for a message."""
    return ", ".join(map(str, names[:count])) + (", ..." if len(names) > count else "")


def _as_source(source: Any) -> Any:
    if isinstance(source, Tensor | np.ndarray):
        return ArrayImages(source)
    if isinstance(source, Sequence) and all(isinstance(item, str | Path) for item in source):
        return tuple(map(Path, source))
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise DataError(f"images must be paths, an array, or have a length and items, unlike a {type(source)}")
    return source

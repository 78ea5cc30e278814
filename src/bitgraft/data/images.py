"""What is known of a data set before any image is opened: files or arrays, labels, classes, splits."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from bitgraft.data.stacks import Stack
from bitgraft.errors import DataError

UNLABELLED = -1


class Source(Protocol):
    """Anything indexed by position: each item a path, a PIL image or an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Picked:
    """Some items of a source, in a given order, without a copy."""

    def __init__(self, source: Source, positions: Sequence[int]) -> None:
        self.source, self.positions = source, np.asarray(positions, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        return self.source[int(self.positions[index])]


@dataclass(frozen=True, eq=False)
class Images:
    """A list of labelled images, none of them decoded yet."""

    source: Any
    """Paths; or one array of images, numpy or torch; or any `Source`."""
    labels: tuple[int, ...]
    """A class by number for each image, -1 where it is not known."""
    ids: tuple[int, ...] | None = None
    """The devkit's ids of the images, for a submission."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the dataclass is frozen for those who use it
        set_(self, "source", _as_source(self.source))
        set_(self, "labels", tuple(int(label) for label in self.labels))
        for name, things in (("labels", self.labels), ("ids", self.ids)):
            if things is not None and len(things) != len(self.source):
                raise DataError(f"{len(self.source)} images have {len(things)} {name}: there must be one for each")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def files(self) -> tuple[Path, ...] | None:
        """The paths, if the images are files."""
        return self.source if isinstance(self.source, tuple) else None

    def pick(self, positions: Sequence[int]) -> "Images":
        files = self.files
        return Images(
            source=Picked(self.source, positions) if files is None else tuple(files[i] for i in positions),
            labels=tuple(self.labels[i] for i in positions),
            ids=None if self.ids is None else tuple(self.ids[i] for i in positions),
        )

    def without(self, bad: Collection[tuple[Path, str]]) -> "Images":
        """All but these files, given as `find_bad` gives them."""
        if self.files is None or not bad:
            return self
        paths = {path for path, _ in bad}
        return self.pick([i for i, path in enumerate(self.files) if path not in paths])

    def __add__(self, other: "Images") -> "Images":
        """Both, one after the other (train and val for a final submission)."""
        if self.files is None or other.files is None:
            raise DataError("only lists of image files can be joined")
        ids = None if self.ids is None or other.ids is None else self.ids + other.ids
        return Images(self.files + other.files, self.labels + other.labels, ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """A data set: its classes, and the images to train, validate and test on."""

    name: str
    classes: tuple[str, ...]
    train: Images
    val: Images | None = None
    test: Images | None = None
    flip: bool = True
    """Whether a mirrored image still shows its class: not so for digits, letters and signs."""
    category_ids: tuple[int, ...] | None = None
    """The devkit's id of each class, for a submission."""

    def __post_init__(self) -> None:
        if not len(self.train):
            raise DataError(f"{self.name}: there is no image to train on")
        for part, images in (("train", self.train), ("val", self.val), ("test", self.test)):
            _check_labels(f"{self.name}, {part}", images, len(self.classes), unlabelled=part == "test")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What will train, but not as well as it might."""
        found = [_missing(self, self.train, "training", "it cannot be learned")]
        if self.val is not None and len(self.val):
            found.append(_missing(self, self.val, "validation", "validation says nothing about it"))
        return tuple(text for text in found if text)


def _as_source(source: Any) -> Source:
    if isinstance(source, Tensor | np.ndarray):
        return Stack(source)
    if isinstance(source, Sequence) and all(isinstance(item, str | Path) for item in source):
        return tuple(map(Path, source))
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise DataError(f"images are paths, an array, or something with a length and items, not a {type(source)}")
    return source  # type: ignore[no-any-return]


def _check_labels(where: str, images: Images | None, classes: int, unlabelled: bool) -> None:
    if images is None:
        return
    known = set(range(classes)) | ({UNLABELLED} if unlabelled else set())
    outside = [i for i, label in enumerate(images.labels) if label not in known]
    if outside:
        first = outside[0]
        which = images.files[first] if images.files is not None else f"image {first}"
        raise DataError(
            f"{where}: {len(outside)} of {len(images)} labels lie outside the {classes} classes, "
            f"the first is {images.labels[first]} of {which}; labels go from 0 to {classes - 1}"
        )


def _missing(splits: Splits, images: Images, part: str, meaning: str) -> str:
    present = Counter(images.labels)
    missing = [name for label, name in enumerate(splits.classes) if not present[label]]
    if not missing:
        return ""
    few = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return f"{len(missing)} of {len(splits.classes)} classes have no {part} image, so {meaning}: {few}"

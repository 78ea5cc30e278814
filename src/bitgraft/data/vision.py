"""torchvision's data sets by name, whatever their constructors are like."""

import inspect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from bitgraft.data.devkit import distinct
from bitgraft.data.folders import VALIDATION, divided
from bitgraft.data.images import Images, Splits
from bitgraft.errors import DataError

UNMIRRORED = frozenset({"mnist", "emnist", "kmnist", "qmnist", "omniglot", "usps", "semeion", "svhn", "gtsrb"})
"""Signs and characters, which a mirror turns into others."""
_TRAIN, _TEST = ("train", "trainval"), ("test",)
_FILES, _PAIRS, _LABELS = ("_image_files", "_images"), ("samples", "_samples"), ("targets", "labels", "_labels", "y")


class Pictures:
    """The images of a torchvision data set without their labels."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index][0]
        except Exception as problem:  # whatever its loader raises
            raise DataError(f"cannot read image {index} of {type(self.dataset).__name__}: {problem}") from problem


def open_torchvision(
    name: str, *, root: Path, download: bool, val_share: float, test_share: float, seed: int
) -> Splits:
    """Its own splits where it has them; the rest by the seed. `test_share` only serves sets without any split."""
    make = _constructor(name)
    takes = inspect.signature(make).parameters
    options = {"root": str(root)} | ({"download": download} if "download" in takes else {})
    if "split" in takes:
        train = _first(name, make, options, _TRAIN)
        val, test = _first(name, make, options, VALIDATION), _first(name, make, options, _TEST)
        if train is None:
            raise DataError(f"torchvision:{name} has no split {' or '.join(_TRAIN)}: open it from Python instead")
    elif "train" in takes:
        train, val = _made(name, make, options | {"train": True}), None
        test = _made(name, make, options | {"train": False})
    else:
        train, val, test = _made(name, make, options), None, None
    has_splits = "split" in takes or "train" in takes
    opened = [None if part is None else read_dataset(part, f"torchvision:{name}") for part in (train, val, test)]
    assert opened[0] is not None
    return divided(
        name,
        _classes(train, [images for images in opened if images is not None]),
        opened[0],
        val=opened[1],
        test=opened[2],
        val_share=val_share,
        test_share=0.0 if has_splits else test_share,
        seed=seed,
        flip=name.lower() not in UNMIRRORED,
    )


def read_dataset(dataset: Any, name: str) -> Images:
    """The data set's files or array if it shows them, and its labels, without decoding more than the first image."""
    if not len(dataset):
        raise DataError(f"{name} is empty")
    pairs = _shown(dataset, _PAIRS)
    files = [pair[0] for pair in pairs] if pairs is not None else _shown(dataset, _FILES)
    labels = [pair[1] for pair in pairs] if pairs is not None else _shown(dataset, _LABELS)
    image, label = dataset[0]
    if labels is None or not _is_number(labels[0]) or int(labels[0]) != label:
        labels = [dataset[i][1] for i in range(len(dataset))]
    if not all(map(_is_number, labels)):
        raise DataError(f"{name} gives no class for each image, but {labels[0]!r}: open it from Python instead")
    return Images(_source(dataset, image, files), tuple(map(int, labels)))


def _constructor(name: str) -> Any:
    from torchvision import datasets  # takes a second to import

    make = getattr(datasets, name, None)
    if not inspect.isclass(make) or "root" not in inspect.signature(make).parameters:
        makers = {known: inspect.signature(getattr(datasets, known)).parameters for known in datasets.__all__}
        known = ", ".join(known for known, takes in makers.items() if "download" in takes)
        raise DataError(f"torchvision:{name} is none of torchvision's data sets; those that download are {known}")
    return make


def _first(name: str, make: Any, options: dict[str, Any], wanted: Iterable[str]) -> Any:
    """The first of these splits that the data set has; it says which by refusing the others with a ValueError."""
    for split in wanted:
        try:
            return _made(name, make, options | {"split": split})
        except ValueError as problem:
            if isinstance(problem, DataError):
                raise
    return None


def _made(name: str, make: Any, options: dict[str, Any]) -> Any:
    """The data set; downloaded only if it is not there yet, since some refuse to download twice."""
    try:
        if options.get("download"):
            with suppress(RuntimeError, OSError):
                return make(**options | {"download": False})
        return make(**options)
    except ValueError:
        raise
    except TypeError as problem:
        raise DataError(f"torchvision:{name} needs more than a name: {problem}; open it from Python") from problem
    except Exception as problem:  # not there, no network, a checksum, a missing package: torchvision's words say which
        hint = "" if options.get("download") or "download" not in options else "; download=True (--download) fetches it"
        raise DataError(f"cannot open torchvision:{name} in {options['root']}: {problem}{hint}") from problem


def _shown(dataset: Any, names: Iterable[str]) -> list[Any] | None:
    for name in names:
        value = getattr(dataset, name, None)
        if isinstance(value, list | tuple | np.ndarray | Tensor) and len(value) == len(dataset):
            return list(value)
    return None


def _source(dataset: Any, image: Any, files: list[Any] | None) -> Any:
    if files is not None and all(isinstance(file, str | Path) for file in files) and Path(files[0]).is_file():
        return tuple(map(Path, files))
    data = getattr(dataset, "data", None)
    if isinstance(data, np.ndarray | Tensor) and len(data) == len(dataset) and data.ndim in (3, 4):
        first = Images(data[:1], (0,)).source[0] if str(data.dtype).endswith("uint8") else None
        if first is not None and isinstance(image, Image.Image) and np.array_equal(first, np.asarray(image)):
            return data
    return Pictures(dataset)


def _is_number(label: Any) -> bool:
    if isinstance(label, Tensor | np.ndarray):
        return label.ndim == 0 and "float" not in str(label.dtype)
    return isinstance(label, int | np.integer)


def _classes(dataset: Any, parts: list[Images]) -> tuple[str, ...]:
    number = 1 + max(max(images.labels) for images in parts)
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    if not isinstance(names, list | tuple) or len(names) < number:
        return tuple(map(str, range(number)))
    return distinct([str(name[0] if isinstance(name, list | tuple) else name) for name in names])

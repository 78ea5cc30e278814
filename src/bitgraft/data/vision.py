"""torchvision's classification data sets by name. Their constructors differ."""

import inspect
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from bitgraft.data.decode import load
from bitgraft.data.folders import VALIDATION
from bitgraft.data.images import Images, Splits, distinct
from bitgraft.errors import DataError

UNFLIPPED = frozenset({"mnist", "emnist", "kmnist", "qmnist", "omniglot", "usps", "semeion", "svhn", "gtsrb"})
"""Data sets of characters and signs, which must not be flipped."""


class Pictures:
    """The images of a torchvision data set without their labels."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _item(self.dataset, index)[0]


def open_torchvision(name: str, *, root: Path, download: bool) -> Splits:
    """Open the splits of a data set. Without splits, all images are for training."""
    make = _constructor(name)
    takes = inspect.signature(make).parameters
    options = {"root": str(root)} | ({"download": download} if "download" in takes else {})
    wanted: tuple[list[dict[str, Any]], ...] = ([{}], [], [])
    if "split" in takes:
        wanted = tuple(
            [{"split": split} for split in known] for known in (("train", "trainval"), VALIDATION, ("test",))
        )
    elif "train" in takes:
        wanted = ([{"train": True}], [], [{"train": False}])
    train, *others = (_first(name, make, [options | choice for choice in choices]) for choices in wanted)
    if train is None:
        raise DataError(f"torchvision:{name} has no split train or trainval: open it in Python instead")
    images = read_dataset(train, f"torchvision:{name}")
    val, test = (None if part is None else read_dataset(part, f"torchvision:{name}") for part in others)
    count = 1 + max(max(part.labels) for part in (images, val, test) if part is not None)
    flip = name.lower() not in UNFLIPPED
    return Splits(name=name, classes=_classes(train, count), train=images, val=val, test=test, flip=flip)


def read_dataset(dataset: Any, name: str) -> Images:
    """Return a data set's images and labels: its files, if it lists them and has no transform.

    If it lists its labels, only one image of each class is decoded.
    """
    if not len(dataset):
        raise DataError(f"{name} is empty")
    transformed = any(getattr(dataset, name, None) is not None for name in ("transform", "transforms"))
    files = None if transformed else next(_listed(dataset, "samples", "_samples", "_image_files", "_images"), None)
    if files is not None and isinstance(files[0], tuple | list):  # pairs of a file and its label
        files = [pair[0] for pair in files]
    usable = files is not None and all(isinstance(file, str | Path) for file in files) and _shows(dataset, files[0])
    return Images(files if usable else Pictures(dataset), tuple(_labels(dataset, name)))


def _labels(dataset: Any, name: str) -> list[int]:
    for listed in _listed(dataset, "samples", "_samples", "targets", "labels", "_labels", "y"):
        with suppress(TypeError):
            labels = [index(item[1] if isinstance(item, tuple | list) else item) for item in listed]
            if _gives(dataset, labels):
                return labels
    labels = [dataset[i][1] for i in range(len(dataset))]
    try:
        return list(map(index, labels))
    except TypeError as problem:
        raise DataError(
            f"{name} has the label {labels[0]!r}, not a class index: return one class per image"
        ) from problem


def _item(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as problem:  # anything that its loader raises
        raise DataError(f"cannot read image {index} of {type(dataset).__name__}: {problem}") from problem


def _shows(dataset: Any, first: str | Path) -> bool:
    """Whether its images are those in its files, not changed by a loader or `__getitem__`, judged by the first."""
    if not Path(first).is_file():
        return False
    with suppress(DataError):  # a file that cannot be read is reported later
        return np.array_equal(np.asarray(load(Path(first))), np.asarray(load(_item(dataset, 0)[0])))
    return True


def _gives(dataset: Any, labels: Sequence[int]) -> bool:
    """Whether it gives the labels that it lists, not changed by a `target_transform`, judged by one of each."""
    for label, position in {label: i for i, label in reversed(list(enumerate(labels)))}.items():
        with suppress(DataError):  # an image that cannot be read is reported later
            if index(_item(dataset, position)[1]) != label:
                return False
    return True


def _listed(dataset: Any, *names: str) -> Iterator[Any]:
    """Yield those of its attributes that have one entry per image."""
    values = (getattr(dataset, name, None) for name in names)
    return (value for value in values if isinstance(value, Sized) and len(value) == len(dataset))


def _constructor(name: str) -> Any:
    from torchvision import datasets  # takes a second to import

    make = getattr(datasets, name, None)
    if not inspect.isclass(make) or "root" not in inspect.signature(make).parameters:
        takes = {known: inspect.signature(getattr(datasets, known)).parameters for known in datasets.__all__}
        known = ", ".join(known for known, parameters in takes.items() if "download" in parameters)
        raise DataError(f"torchvision has no data set {name}; those that it can download are {known}")
    return make


def _first(name: str, make: Any, choices: Iterable[dict[str, Any]]) -> Any:
    """Construct the data set with the first options that it accepts. It raises a ValueError for unknown splits."""
    for options in choices:
        try:
            if options.get("download"):  # try without first, since some refuse to download twice
                with suppress(RuntimeError, OSError):
                    return make(**options | {"download": False})
            return make(**options)
        except ValueError:
            continue
        except TypeError as problem:
            raise DataError(f"torchvision:{name} needs more than a name: {problem}; open it in Python") from problem
        except Exception as problem:  # missing files, no network, a wrong checksum, a missing package
            hint = "" if options.get("download", True) else "; in Python, open_data(..., download=True) downloads it"
            raise DataError(f"cannot open torchvision:{name} in {options['root']}: {problem}{hint}") from problem
    return None


def _classes(dataset: Any, number: int) -> tuple[str, ...]:
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    if not isinstance(names, list | tuple) or len(names) < number:
        return tuple(map(str, range(number)))
    return distinct([str(name[0] if isinstance(name, list | tuple) else name) for name in names])

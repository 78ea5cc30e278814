"""Folders of images, a folder for each class: train/ val/ test/ with classes below them, or the classes alone."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitgraft.data.images import Images, Splits
from bitgraft.data.stratify import check_shares, split
from bitgraft.errors import DataError

_KNOWN = "jpg jpeg jpe jfif png bmp gif webp tif tiff ppm pgm pbm pnm jp2 avif"
SUFFIXES = frozenset(f".{ending}" for ending in _KNOWN.split())
VALIDATION = ("val", "valid", "validation")


def open_folder(root: Path, *, val_share: float, test_share: float, seed: int) -> Splits:
    """What is not there as a folder is split off the training images by the seed."""
    parts = {name.lower(): root / name for name in _folders(root)}
    if "train" not in parts:
        classes, images = read_folder(root)
        return divided(root.name, classes, images, val_share=val_share, test_share=test_share, seed=seed)
    classes, train = read_folder(parts["train"])
    val = next((read_known(parts[name], classes) for name in VALIDATION if name in parts), None)
    test = read_known(parts["test"], classes) if "test" in parts else None
    return divided(root.name, classes, train, val=val, test=test, val_share=val_share, test_share=test_share, seed=seed)


def divided(
    name: str,
    classes: tuple[str, ...],
    train: Images,
    *,
    val: Images | None = None,
    test: Images | None = None,
    val_share: float,
    test_share: float,
    seed: int,
    flip: bool = True,
) -> Splits:
    """The splits, with those that are missing taken from the training images."""
    check_shares(val_share, test_share)
    parts = split(train.labels, 0.0 if val else val_share, 0.0 if test else test_share, seed)
    return Splits(
        name=name,
        classes=classes,
        train=train.pick(parts.train),
        val=val or (train.pick(parts.val) if parts.val else None),
        test=test or (train.pick(parts.test) if parts.test else None),
        flip=flip,
    )


def read_folder(folder: Path) -> tuple[tuple[str, ...], Images]:
    """The classes in the order of their names, and their images in the order of theirs; every class must have some."""
    classes = _folders(folder)
    if not classes:
        raise DataError(_no_classes(folder))
    images = read_known(folder, classes)
    present = set(images.labels)
    empty = [name for label, name in enumerate(classes) if label not in present]
    if len(empty) == len(classes):
        raise DataError(f"there are no images in the folders below {folder}; known endings are {_KNOWN}")
    if empty:
        raise DataError(
            f"{len(empty)} of {len(classes)} class folders in {folder} hold no image: {_few(empty)}. "
            "Put images there or remove the folder"
        )
    return classes, images


def read_known(folder: Path, classes: Sequence[str]) -> Images:
    """The images of a folder whose classes are known from elsewhere: of all of them or some, but no others."""
    numbers = {name: label for label, name in enumerate(classes)}
    found = {name: list(_images(folder / name)) for name in _folders(folder)}
    if strange := [name for name, files in found.items() if files and name not in numbers]:
        raise DataError(
            f"{folder} has {len(strange)} class folders that the training images do not have: {_few(strange)}; "
            f"the classes are {_few(list(classes))}"
        )
    pairs = [(path, numbers[name]) for name, files in found.items() for path in files]
    if not pairs:
        raise DataError(f"there is no image in {folder}")
    return Images(tuple(path for path, _ in pairs), tuple(label for _, label in pairs))


def _folders(folder: Path) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not _hidden(entry.name)))
    except OSError as problem:
        raise DataError(f"cannot read the folder {folder}: {problem.strerror or problem}") from problem


def _images(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Images in the folder and below it, links followed, but never round in a circle."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        if _hidden(entry.name):
            continue
        if entry.is_dir():
            yield from _images(folder / entry.name, (*above, real))
        elif Path(entry.name).suffix.lower() in SUFFIXES:
            yield folder / entry.name


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _no_classes(folder: Path) -> str:
    if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir()):
        return f"images lie directly in {folder}: put those of each class into a folder of its own, named after it"
    return f"{folder} has no class folders: there should be a folder for each class, with its images inside"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

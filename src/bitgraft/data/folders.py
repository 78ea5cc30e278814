"""Image folders with one subfolder per class, split into train/ val/ test/ or not."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitgraft.data.images import Images, Splits, few
from bitgraft.errors import DataError

_EXTENSIONS = "jpg jpeg jpe jfif png bmp gif webp tif tiff ppm pgm pbm pnm jp2 avif"
SUFFIXES = frozenset(f".{extension}" for extension in _EXTENSIONS.split())
VALIDATION = ("val", "valid", "validation")


def open_folder(root: Path) -> Splits:
    """Open the splits in a folder. Without split folders, all images are for training."""
    parts, lacks_train = _parts(root)
    if lacks_train:
        found = " and ".join(f"{name}/" for name in parts)
        raise DataError(
            f"{root} has {found} but no train/: put the training images into {root / 'train'}, one subfolder per "
            f"class, or pass {next(iter(parts.values()))} as the data set"
        )
    classes, train = read_folder(parts.get("train", root))
    if "train" not in parts:
        return Splits(name=root.name, classes=classes, train=train)
    val = next((read_known(parts[name], classes) for name in VALIDATION if name in parts), None)
    test = read_known(parts["test"], classes) if "test" in parts else None
    return Splits(name=root.name, classes=classes, train=train, val=val, test=test)


def folder_without_train(root: Path, part: str) -> Path | None:
    """Return the folder with the class folders of val or test, if a data set has no train/.

    Without split folders, all images are test images.
    """
    parts, lacks_train = _parts(root)
    if lacks_train:
        return next((parts[name] for name in (VALIDATION if part == "val" else (part,)) if name in parts), None)
    return root if part == "test" and "train" not in parts else None


def read_folder(folder: Path) -> tuple[tuple[str, ...], Images]:
    """Return classes and images, both sorted by name. Every class must have images."""
    classes = _subfolders(folder)
    if not classes:
        if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir()):
            raise DataError(f"there are images directly in {folder}: move them into one subfolder per class")
        raise DataError(f"{folder} has no class folders: create one subfolder per class with its images")
    images = read_known(folder, classes)
    present = set(images.labels)
    if empty := [name for label, name in enumerate(classes) if label not in present]:
        raise DataError(
            f"{len(empty)} of {len(classes)} class folders in {folder} hold no image: {few(empty)}. "
            "Add images or remove the folder"
        )
    return classes, images


def read_known(folder: Path, classes: Sequence[str]) -> Images:
    """Return the images of a folder that has some of these classes, and no others."""
    labels = {name: label for label, name in enumerate(classes)}
    found = [(path, name) for name in _subfolders(folder) for path in _images(folder / name)]
    if unknown := list(dict.fromkeys(name for _, name in found if name not in labels)):
        raise DataError(
            f"{folder} has {len(unknown)} class folders that are not training classes: {few(unknown)}; "
            f"the classes are {few(classes)}"
        )
    if not found:
        raise DataError(f"there is no image in {folder}; supported extensions are {_EXTENSIONS}")
    return Images(tuple(path for path, _ in found), tuple(labels[name] for _, name in found))


def _parts(root: Path) -> tuple[dict[str, Path], bool]:
    """Return the subfolders, and whether they are splits without train/."""
    parts = {name.lower(): root / name for name in _subfolders(root)}
    return parts, bool(parts) and parts.keys() <= {*VALIDATION, "test"}


def _subfolders(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(entry.name for entry in _entries(folder) if entry.is_dir())
    except OSError as problem:
        raise DataError(f"cannot read the folder {folder}: {problem.strerror or problem}") from problem


def _images(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the images in a folder and its subfolders. Symbolic links are followed unless they form a cycle."""
    real = os.path.realpath(folder)
    for entry in _entries(folder) if real not in above else ():
        if entry.is_dir():
            yield from _images(folder / entry.name, (*above, real))
        elif Path(entry.name).suffix.lower() in SUFFIXES:
            yield folder / entry.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the sorted entries of a folder, without hidden files."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name != "__MACOSX"]
    return sorted(shown, key=lambda entry: entry.name)

"""Open a data set by its name, or from arrays."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitgraft.data.decode import load
from bitgraft.data.devkit import domains, open_devkit
from bitgraft.data.folders import folder_without_train, open_folder, read_folder
from bitgraft.data.images import Images, Splits, few
from bitgraft.data.packages import PACKAGES, open_package
from bitgraft.data.vision import open_torchvision
from bitgraft.errors import DataError

FORMS = ", ".join(["DEVKIT:DOMAIN", "torchvision:NAME", *(f"package:{name}" for name in PACKAGES)])
CACHE = Path.home() / ".cache" / "bitgraft" / "data"
_TEST_SHARE = 0.2
_DOMAIN = re.compile(r"(?P<root>.+?):(?P<domain>[\w.-]+)(?P<joined>:train\+val)?")


def open_data(
    spec: str | Path,
    *,
    val_share: float = 0.1,
    test_share: float | None = None,
    seed: int = 0,
    root: Path | None = None,
    download: bool = False,
) -> Splits:
    """Open the data set that `spec` names.

    Args:
        spec: a folder with train/, val/ and test/ (the last two are optional) or with one subfolder per class;
            DEVKIT:DOMAIN, a domain of the Visual Decathlon (DEVKIT:DOMAIN:train+val adds val to train);
            torchvision:NAME; package:elpv or package:digits.
        val_share: share of the training images to hold out if the data set has no validation images.
        test_share: the same for test images. The default is 0 for folders, and 0.2 for packages and for torchvision
            data sets without splits.
        seed: of the random splits.
        root: base of relative folders, and torchvision's data folder (default ~/.cache/bitgraft/data).
        download: fetch a data set of torchvision that is not there.
    """
    text = str(spec)
    held_out = _TEST_SHARE if test_share is None else test_share
    if text.startswith("package:"):
        return open_package(text.removeprefix("package:")).hold_out(val_share, held_out, seed)
    if text.startswith("torchvision:"):
        splits = open_torchvision(text.removeprefix("torchvision:"), root=root or CACHE, download=download)
        has_splits = splits.val is not None or splits.test is not None
        return splits.hold_out(val_share, 0.0 if has_splits else held_out, seed)
    base = root or Path()
    folder = base / Path(text).expanduser()
    if folder.is_dir():
        if inside := domains(folder):
            raise DataError(f"{folder} is a decathlon devkit: add a domain, as in {text}:{inside[0]}")
        return open_folder(folder).hold_out(val_share, test_share or 0.0, seed)
    if found := _DOMAIN.fullmatch(text):
        folder = base / Path(found["root"]).expanduser()
        if folder.is_dir():
            return open_devkit(folder, found["domain"], train_on_val=found["joined"] is not None)
    raise DataError(
        f"no data set at {text!r}: there is no folder {folder}; give a FOLDER with one subfolder per class, or one of "
        f"{FORMS}"
    )


def open_to_evaluate(spec: str | Path, part: str, *, seed: int = 0) -> Splits:
    """Open a data set to measure accuracy on its train, val or test images.

    A folder needs no train/ for that, and all images of a folder without splits are test images.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir() and not domains(folder) and (whole := folder_without_train(folder, part)):
        classes, images = read_folder(whole)
        val, test = (images if part == name else None for name in ("val", "test"))
        return Splits(name=folder.name, classes=classes, train=images, val=val, test=test)
    return open_data(spec, val_share=0.0 if part == "train" else 0.1, seed=seed)


def from_arrays(
    images: Tensor | NDArray[Any],
    labels: Sequence[int] | Sequence[str] | Tensor | NDArray[Any],
    classes: Sequence[str] | None = None,
    *,
    val_share: float = 0.1,
    test_share: float = 0.0,
    seed: int = 0,
    name: str = "arrays",
) -> Splits:
    """Make a data set of images in memory: uint8 or floats from 0 to 1, (N, H, W), (N, H, W, C) or (N, C, H, W).

    Labels are class indices or class names.
    """
    values = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "iuUO":
        raise DataError(f"labels must be one integer or name per image, not {values.dtype} of shape {values.shape}")
    if values.dtype.kind in "UO":
        names = [str(value) for value in values]
        classes = sorted(set(names)) if classes is None else list(classes)
        if unknown := sorted(set(names) - set(classes)):
            raise DataError(f"labels that are not among the classes: {few(unknown)}")
        values = np.asarray([classes.index(value) for value in names], dtype=np.int64)
    if classes is None:
        classes = list(map(str, range(int(values.max(initial=0)) + 1)))
    splits = Splits(name=name, classes=tuple(classes), train=Images(images, tuple(values.tolist())))
    return splits.hold_out(val_share, test_share, seed)


def find_bad(images: Images) -> list[tuple[Path, str]]:
    """Return the files that cannot be decoded, with the reasons."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        faults = zip(images.files or (), pool.map(_fault, images.files or ()), strict=True)
        return [(path, reason) for path, reason in faults if reason]


def drop_bad(splits: Splits) -> tuple[Splits, list[tuple[Path, str]]]:
    """Return the splits without files that cannot be decoded, and those files with the reasons."""
    bad = [fault for images in (splits.train, splits.val, splits.test) if images for fault in find_bad(images)]
    train = splits.train.without(bad)
    if lost := sorted(set(splits.train.labels) - set(train.labels)):
        raise DataError(
            f"{splits.name}: without the {len(bad)} unreadable files, {len(lost)} classes have no training image left, "
            f"first {splits.classes[lost[0]]}; the first unreadable file is {bad[0][0]}: {bad[0][1]}"
        )
    val, test = (images and (images.without(bad) or None) for images in (splits.val, splits.test))
    return replace(splits, train=train, val=val, test=test), bad


def _fault(path: Path) -> str:
    try:
        load(path)
    except DataError as problem:
        return str(problem).removeprefix(f"cannot read {path}: ")
    return ""

"""Opening a data set by one line of text, or from arrays."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitgraft.data.decode import find_bad
from bitgraft.data.devkit import domains, open_devkit
from bitgraft.data.folders import divided, open_folder
from bitgraft.data.images import Images, Splits
from bitgraft.data.packages import PACKAGES, open_package
from bitgraft.data.vision import open_torchvision
from bitgraft.errors import DataError

__all__ = ["FORMS", "Images", "Splits", "drop_bad", "from_arrays", "open_data"]

FORMS = f"""\
  FOLDER                        with train/ val/ test/ in it (val and test may be missing), or class folders alone
  DEVKIT:DOMAIN                 a domain of the Visual Decathlon, as in decathlon-1.0:gtsrb
  DEVKIT:DOMAIN:train+val       the same with val joined to train, for a final submission
  torchvision:NAME              as in torchvision:Flowers102; downloaded when asked
  {", ".join(f"package:{name}" for name in PACKAGES):<30}data that installs with pip"""
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
    """The data set that `spec` names, in one of the FORMS.

    val_share, test_share: what is held back where the data set has no such split of its own; test_share is 0 for
    folders, and 0.2 for packages and torchvision's sets without any split. root: where relative folders start, and
    where torchvision keeps its data (~/.cache/bitgraft/data).
    """
    text = str(spec)
    shares = {"val_share": val_share, "test_share": _TEST_SHARE if test_share is None else test_share}
    if text.startswith("package:"):
        return open_package(text.removeprefix("package:"), seed=seed, **shares)
    if text.startswith("torchvision:"):
        name = text.removeprefix("torchvision:")
        return open_torchvision(name, root=root or CACHE, download=download, seed=seed, **shares)
    folder = _below(root, text)
    if folder.is_dir():
        if inside := domains(folder):
            raise DataError(f"{folder} is a decathlon devkit: name a domain, as in {text}:{inside[0]}")
        return open_folder(folder, val_share=val_share, test_share=test_share or 0.0, seed=seed)
    found = _DOMAIN.fullmatch(text)
    if found and (devkit := _below(root, found["root"])).is_dir():
        return open_devkit(devkit, found["domain"], train_on_val=found["joined"] is not None)
    raise DataError(f"no data set at {text!r}: there is no folder {folder}. A data set is one of\n{FORMS}")


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
    """Images in memory: uint8 or floats from 0 to 1, (N, H, W), (N, H, W, C) or (N, C, H, W). Labels are numbers, or
    the classes' names."""
    values = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "iuUO":
        raise DataError(f"labels are a whole number or a name for each image, not {values.dtype} {values.shape}")
    if values.dtype.kind in "UO":
        names = [str(value) for value in values]
        classes = tuple(sorted(set(names))) if classes is None else tuple(classes)
        if strange := sorted(set(names) - set(classes)):
            raise DataError(f"labels outside the classes: {', '.join(strange[:5])}")
        values = np.asarray([classes.index(value) for value in names], dtype=np.int64)
    if classes is None:
        classes = tuple(map(str, range(int(values.max(initial=0)) + 1)))
    every = Images(images, tuple(values.tolist()))
    Splits(name=name, classes=tuple(classes), train=every)  # labels are checked before they are split
    return divided(name, tuple(classes), every, val_share=val_share, test_share=test_share, seed=seed)


def drop_bad(splits: Splits, *, workers: int | None = None) -> tuple[Splits, list[tuple[Path, str]]]:
    """The same without the files that cannot be decoded, and those files with the reasons."""
    parts = (splits.train, splits.val, splits.test)
    bad = [fault for images in parts if images is not None for fault in find_bad(images, workers=workers)]
    train = splits.train.without(bad)
    if lost := sorted(set(splits.train.labels) - set(train.labels)):
        raise DataError(
            f"{splits.name}: without the {len(bad)} unreadable files, {len(lost)} classes have no training image left, "
            f"first {splits.classes[lost[0]]}; the first such file is {bad[0][0]}: {bad[0][1]}"
        )
    val, test = (images and (images.without(bad) or None) for images in (splits.val, splits.test))
    return replace(splits, train=train, val=val, test=test), bad


def _below(root: Path | None, text: str) -> Path:
    path = Path(text).expanduser()
    return path if root is None else root / path

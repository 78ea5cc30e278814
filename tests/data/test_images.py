from pathlib import Path

import numpy as np
import pytest
import torch

from bitgraft.data.decode import ArrayImages
from bitgraft.data.images import Images, Splits, distinct
from bitgraft.data.splits import from_arrays
from bitgraft.errors import DataError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (6, 10, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "same",
    [
        COLOUR,
        COLOUR.transpose(0, 3, 1, 2),
        torch.from_numpy(COLOUR),
        torch.from_numpy(COLOUR).permute(0, 3, 1, 2),
        COLOUR.astype(np.float32) / 255,
        torch.from_numpy(COLOUR).double() / 255,
        COLOUR.astype(np.uint16) << 8,
        (COLOUR.astype(np.uint16) << 8).astype(">u2"),
        np.flip(np.flip(COLOUR, 1).copy(), 1),
    ],
    ids=["NHWC", "NCHW", "torch NHWC", "torch NCHW", "float", "double", "16 bit", "big-endian", "negative strides"],
)
def test_all_array_layouts_and_dtypes_give_the_same_images(same):
    images = ArrayImages(same)
    assert len(images) == 6
    assert all((images[i] == COLOUR[i]).all() for i in range(6))


def test_arrays_of_grey_images():
    grey = COLOUR[..., 0]
    for same in (grey, grey[..., None], grey[:, None], torch.from_numpy(grey)[:, None]):
        assert (ArrayImages(same)[2] == grey[2]).all()
    assert set(np.unique(ArrayImages(grey > 100)[0])) == {0, 255}


def test_where_both_layouts_fit_numpy_is_NHWC_and_torch_NCHW():  # noqa: N802
    both = RNG.integers(0, 256, (2, 3, 5, 3), dtype=np.uint8)
    assert ArrayImages(both)[0].shape == (3, 5, 3)
    assert ArrayImages(torch.from_numpy(both))[0].shape == (5, 3, 3)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 5, 5, 2), np.uint8), "shape"),
        (np.zeros((5, 5), np.uint8), "shape"),
        (np.zeros((2, 5, 5), np.int64), "int64"),
        (np.full((2, 5, 5), 2.0), "between 0 and 1"),
        (np.full((2, 5, 5), np.nan), "between 0 and 1"),
        (np.array([np.zeros((2, 2)), np.zeros((3, 3))], dtype=object), "differ in size"),
    ],
)
def test_arrays_that_are_no_images_are_refused(images, message):
    with pytest.raises(DataError, match=message):
        ArrayImages(images)


def test_images_are_picked_without_a_copy():
    images = Images(COLOUR, (0, 1, 2, 0, 1, 2), ids=(10, 11, 12, 13, 14, 15))
    some = images.pick([4, 1])
    assert (some.labels, some.ids, len(some)) == ((1, 1), (14, 11), 2)
    assert (some.source[0] == COLOUR[4]).all()
    assert some.pick([1]).ids == (11,)
    assert images.files is None


def test_files_are_dropped_and_joined():
    images = Images(["a.jpg", "b.jpg", "c.jpg"], (0, 1, 0), ids=(1, 2, 3))
    assert images.files == (Path("a.jpg"), Path("b.jpg"), Path("c.jpg"))
    left = images.without([(Path("b.jpg"), "truncated")])
    assert (left.files, left.labels, left.ids) == ((Path("a.jpg"), Path("c.jpg")), (0, 0), (1, 3))
    both = left + images.pick([1])
    assert (both.labels, both.ids) == ((0, 0, 1), (1, 3, 2))
    with pytest.raises(DataError, match="joined"):
        images + Images(COLOUR, (0,) * 6)


def test_images_and_labels_must_match():
    with pytest.raises(DataError, match="3 images have 2 labels"):
        Images(["a.jpg", "b.jpg", "c.jpg"], (0, 1))
    with pytest.raises(DataError, match="1 ids"):
        Images(["a.jpg", "b.jpg"], (0, 1), ids=(1,))
    with pytest.raises(DataError, match="length and items"):
        Images(3, (0,))


def test_labels_outside_the_classes_are_refused_by_file():
    good, bad = Images(["a.jpg"], (0,)), Images(["a.jpg", "b.jpg"], (0, 2))
    with pytest.raises(DataError, match=r"val: 1 of 2 labels are not between 0 and 1, the first is 2 of b\.jpg"):
        Splits(name="pets", classes=("cat", "dog"), train=good, val=bad)
    with pytest.raises(DataError, match="not between 0 and 1"):
        Splits(name="pets", classes=("cat", "dog"), train=Images(["a.jpg"], (-1,)))
    Splits(name="pets", classes=("cat", "dog"), train=good, test=Images(["a.jpg"], (-1,)))
    with pytest.raises(DataError, match="there is no training image"):
        Splits(name="pets", classes=("cat",), train=Images((), ()))


def test_missing_classes_give_a_warning():
    train, val = Images(["a.jpg", "b.jpg"] * 5, (0, 1) * 5), Images(["c.jpg"] * 4, (1,) * 4)
    assert Splits(name="pets", classes=("cat", "dog"), train=train).warnings == ()
    (warning,) = Splits(name="pets", classes=("cat", "dog"), train=train, val=val).warnings
    assert warning == "1 of 2 classes have no validation image, so validation says nothing about it: cat"
    (warning,) = Splits(name="pets", classes=("cat", "dog", "fox", "owl"), train=train).warnings
    assert warning == "2 of 4 classes have no training image, so they cannot be learned: fox, owl"


def test_few_images_give_a_warning():
    train = Images(["a.jpg"] * 7, (0,) * 5 + (1,) * 2)
    few, chance = Splits(name="pets", classes=("cat", "dog"), train=train, val=train.pick([0, 5])).warnings
    assert few == "1 of 2 classes have fewer than 5 training images, too few to learn them well: dog"
    assert chance.startswith("a validation set of 2 for 2 classes is small")


def test_arrays_become_splits():
    splits = from_arrays(np.repeat(COLOUR, 5, axis=0), np.arange(30) % 3, test_share=0.2)
    assert splits.classes == ("0", "1", "2")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (21, 3, 6)


def test_labels_may_be_names():
    splits = from_arrays(COLOUR, ["dog", "cat"] * 3, val_share=0)
    assert splits.classes == ("cat", "dog")
    assert splits.train.labels == (1, 0) * 3
    assert splits.val is None
    assert from_arrays(COLOUR, ["dog", "cat"] * 3, ["dog", "cat"], val_share=0).train.labels == (0, 1) * 3


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([0, 1, 2] * 2, ["a", "b"]), ([0.5] * 6, None), ([[0]] * 6, None), (["a", "z"] * 3, ["a"]), ([0, -1] * 3, None)],
)
def test_arrays_with_labels_that_do_not_fit_are_refused(labels, classes):
    with pytest.raises(DataError, match="labels"):
        from_arrays(COLOUR, labels, classes)


def test_names_are_made_distinct():
    assert distinct(["a", "b"]) == ("a", "b")
    assert distinct(["a", "b", "a"]) == ("a (0)", "b", "a (2)")


def test_invalid_shares_are_refused_even_if_nothing_is_held_out():
    images = Images((Path("a.png"), Path("b.png")), (0, 1))
    splits = Splits(name="whole", classes=("a", "b"), train=images, val=images, test=images)
    with pytest.raises(DataError, match=r"val_share is 1\.5, but a share of images"):
        splits.hold_out(1.5, 0.0, seed=0)


def test_a_data_set_is_shown_in_one_line_however_many_images_it_has():
    images = Images([Path(f"{number}.png") for number in range(5_000)], [0, 1] * 2_500)
    shown = repr(Splits(name="photos", classes=("a", "b"), train=images))
    assert "train=Images(5000), val=None" in shown
    assert len(shown) < 200

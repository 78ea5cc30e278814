import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from bitgraft.data.splits import open_data
from bitgraft.data.vision import read_dataset
from bitgraft.errors import DataError

COLOUR = np.random.default_rng(0).integers(0, 256, (20, 6, 6, 3), dtype=np.uint8)


class Arrays:
    """Like CIFAR: train=, data, targets and classes."""

    layout, classes = "NHWC", ["cat", "dog"]

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        self.data = COLOUR if train else COLOUR[:4]
        if self.layout == "NCHW":
            self.data = self.data.transpose(0, 3, 1, 2)
        self.targets = [i % 2 for i in range(len(self.data))]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return Image.fromarray(COLOUR[index]), self.targets[index]


class Transposed(Arrays):
    """Like SVHN: channels first, without class names."""

    layout, classes = "NCHW", None


class Odd(Arrays):
    """Its items differ from its data."""

    def __getitem__(self, index):
        return Image.fromarray(255 - COLOUR[index]), self.targets[index]


class Hidden:
    """Only items; split= is train or test."""

    names, made = ("train", "test"), []

    def __init__(self, root, split="train", download=False):
        if split not in self.names:
            raise ValueError(f"Unknown value '{split}' for argument split")
        self.made.append(split)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index >= 20:
            raise IndexError
        return Image.fromarray(COLOUR[index]), torch.tensor(index % 3)


class Whole(Hidden):
    """Like EuroSAT: without splits."""

    def __init__(self, root, download=False):
        pass


class Attributes(Whole):
    def __getitem__(self, index):
        return Image.fromarray(COLOUR[index]), torch.zeros(40)


class Empty(Whole):
    def __len__(self):
        return 0


class Fussy(Whole):
    def __init__(self, root, year):
        pass


class Remote(Hidden):
    """Refuses to download twice."""

    names, there = ("trainval", "val", "test"), False

    def __init__(self, root, split="train", download=False):
        super().__init__(root, split)
        if download and self.there:
            raise RuntimeError("The directory already exists")
        type(self).there |= download
        if not self.there:
            raise RuntimeError("Dataset not found")


@pytest.fixture
def named(monkeypatch):
    def name(make, as_="Fake"):
        monkeypatch.setattr(datasets, as_, make, raising=False)
        return f"torchvision:{as_}"

    return name


def sizes(splits):
    return tuple(None if part is None else len(part) for part in (splits.train, splits.val, splits.test))


@pytest.mark.parametrize("make", [Arrays, Transposed])
def test_sets_that_hold_arrays(named, make):
    splits = open_data(named(make))
    assert splits.classes == (("cat", "dog") if make is Arrays else ("0", "1"))
    assert sizes(splits) == (18, 2, 4)
    assert all((np.asarray(splits.test.source[i]) == COLOUR[i]).all() for i in range(4))
    assert splits.test.labels == (0, 1, 0, 1)


def test_images_are_those_that_the_set_gives_not_those_that_it_holds(named):
    splits = open_data(named(Odd))
    assert (np.asarray(splits.test.source[1]) == 255 - COLOUR[1]).all()


def test_an_image_that_fails_is_named(named):
    class Failing(Odd):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("image file is truncated")
            return super().__getitem__(index)

    test = open_data(named(Failing)).test
    with pytest.raises(DataError, match="cannot read image 3 of Failing: image file is truncated"):
        test.source[3]


def test_splits_are_found_by_trying(named):
    splits = open_data(named(Hidden), val_share=0.2)
    assert sizes(splits) == (16, 4, 20)
    assert splits.classes == ("0", "1", "2")
    assert splits.test.labels[:4] == (0, 1, 2, 0)


def test_a_set_without_splits_is_split_by_the_seed(named):
    assert sizes(open_data(named(Whole))) == (14, 2, 4)
    assert sizes(open_data(named(Whole), test_share=0, val_share=0.5)) == (10, 10, None)


def test_downloads_happen_when_asked_and_once(named, tmp_path):
    with pytest.raises(DataError, match=r"not found; in Python, open_data\(\.\.\., download=True\) downloads"):
        open_data(named(Remote), root=tmp_path)
    splits = open_data(named(Remote), root=tmp_path, download=True)
    assert sizes(splits) == (20, 20, 20)
    assert sizes(open_data(named(Remote), root=tmp_path)) == (20, 20, 20)


def test_real_data_sets_that_are_not_downloaded_are_refused(tmp_path):
    for name in ("CIFAR10", "Flowers102", "SVHN", "GTSRB", "FashionMNIST", "EuroSAT", "DTD", "OxfordIIITPet"):
        with pytest.raises(DataError, match=f"cannot open torchvision:{name}"):
            open_data(f"torchvision:{name}", root=tmp_path)


def test_a_real_data_set_with_fake_files(tmp_path):
    folder = tmp_path / "eurosat" / "2750"
    for name in ("Forest", "River"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(COLOUR[i]).save(folder / name / f"{i}.png")
    splits = open_data("torchvision:EuroSAT", root=tmp_path)
    assert splits.classes == ("Forest", "River")
    assert sizes(splits) == (14, 2, 4)
    assert splits.train.files[0].suffix == ".png"


def test_characters_and_signs_are_not_mirrored(named):
    assert open_data(named(Arrays)).flip
    assert not open_data(named(Arrays, "SVHN")).flip


@pytest.mark.parametrize(
    ("make", "message"),
    [(Attributes, "not a class index"), (Empty, "is empty"), (Fussy, "needs more than a name.*year")],
)
def test_sets_of_another_kind_are_refused(named, make, message):
    with pytest.raises(DataError, match=message):
        open_data(named(make))


@pytest.mark.parametrize("name", ["Cats", "FakeData", "wrap_dataset_for_transforms_v2", "vision"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(DataError, match=r"CIFAR10.*Flowers102"):
        open_data(f"torchvision:{name}")


def test_a_set_without_training_images(named):
    class Only(Hidden):
        names = ("test",)

    with pytest.raises(DataError, match="no split train or trainval"):
        open_data(named(Only))


def squares(folder):
    for name, colour in zip("abcd", COLOUR, strict=False):
        (folder / name).mkdir()
        for number in range(2):
            Image.fromarray(colour).save(folder / name / f"{number}.png")
    return folder


class Cropped(datasets.ImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.crop((0, 0, 1, 1)), label


class Relabelled(datasets.ImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label % 2


def test_images_and_labels_are_those_that_a_set_gives_not_those_in_its_folder(tmp_path):
    folder = squares(tmp_path)
    assert read_dataset(datasets.ImageFolder(folder), "it").files is not None
    halved = datasets.ImageFolder(folder, target_transform=lambda label: label // 2)
    assert read_dataset(halved, "it").labels == (0, 0, 0, 0, 1, 1, 1, 1)
    assert read_dataset(Relabelled(folder), "it").labels == (0, 0, 1, 1, 0, 0, 1, 1)
    assert read_dataset(Cropped(folder), "it").source[0].size == (1, 1)
    white = datasets.ImageFolder(folder, loader=lambda path: Image.new("RGB", (5, 5), "white"))
    assert read_dataset(white, "it").source[3].size == (5, 5)


def test_an_unreadable_image_does_not_hide_the_files(tmp_path):
    folder = squares(tmp_path)
    (folder / "a" / "0.png").write_bytes(b"no image")
    images = read_dataset(datasets.ImageFolder(folder), "it")
    assert images.labels == (0, 0, 1, 1, 2, 2, 3, 3)
    assert images.files[0] == folder / "a" / "0.png"

import contextlib
import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from bitgraft.data import dataset, preprocessing
from bitgraft.data.dataset import ImageDataset, cache_room
from bitgraft.data.images import Images
from bitgraft.data.preprocessing import Augmentation, Preprocessing, evaluation_tensor
from bitgraft.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
FORK = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
SMALL = Preprocessing((16, 16), resize=20)
RESIZED = Augmentation(crop="random-resized")
AUGMENTATIONS = {
    "random": Augmentation(),
    "random-resized": RESIZED,
    "none": Augmentation(crop="none"),
    "evaluation": None,
}


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for i in range(12):
        paths.append(tmp_path / f"{i:02d}.png")
        Image.fromarray(rng.integers(0, 256, (24 + i, 30, 3), dtype=np.uint8)).save(paths[-1])
    return Images(paths, [i % 3 for i in range(12)])


def batches(data, epochs=(0, 1), **options):
    loader = DataLoader(data, batch_size=5, **options)
    found = []
    for epoch in epochs:
        data.set_epoch(epoch)
        found += [tensor for batch in loader for tensor in batch]
    return found


def decoded(data):
    """Count the cached images: those that can be read without their files."""
    found = 0
    for index, path in enumerate(data.images.files):
        away = path.rename(path.with_suffix(".away"))
        with contextlib.suppress(DataError):
            found += bool(data.without_augmentation()[index])
        away.rename(path)
    return found


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_workers_change_nothing(images, augmentation):
    alone = batches(ImageDataset(images, SMALL, augmentation, seed=3))
    for workers in (1, 2):
        data = ImageDataset(images, SMALL, augmentation, seed=3)
        assert equal(batches(data, num_workers=workers, multiprocessing_context=FORK), alone)


def test_spawned_workers_share_cache_and_epoch(images):
    alone = batches(ImageDataset(images, SMALL, Augmentation(), seed=3))
    data = ImageDataset(images, SMALL, Augmentation(), seed=3)
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    assert equal(batches(data, **options), alone)
    assert decoded(data) == 12


def test_forked_workers_fill_the_cache_for_all(images, monkeypatch):
    data = ImageDataset(images, SMALL, Augmentation())
    first = batches(data, epochs=[0], num_workers=2, multiprocessing_context=FORK)
    assert decoded(data) == 12
    monkeypatch.setattr(dataset, "resize_to_frame", None)  # decoding again would fail
    assert equal(batches(data, epochs=[0]), first)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_batches_order_and_subsets_change_nothing(images, augmentation):
    data = ImageDataset(images, SMALL, augmentation)
    one_by_one = [ImageDataset(images, SMALL, augmentation)[i] for i in range(12)]
    for order in (list(range(12)), [7, 3, 7, 11]):
        for (tensor, label), index in zip(data.__getitems__(order), order, strict=True):
            assert torch.equal(tensor, one_by_one[index][0])
            assert label == one_by_one[index][1] == images.labels[index]
    assert torch.equal(Subset(data, [4, 5])[1][0], one_by_one[5][0])


def test_epochs_and_seeds_differ(images):
    data = ImageDataset(images, SMALL, Augmentation())
    first = batches(data, epochs=[0])
    assert not equal(batches(data, epochs=[1]), first)
    assert equal(batches(data, epochs=[0]), first)
    assert not equal(batches(ImageDataset(images, SMALL, Augmentation(), seed=1), epochs=[0]), first)


def test_evaluation_is_evaluation_tensor(images):
    data = ImageDataset(images, SMALL)
    for _ in range(2):  # decoded, then from the cache
        for i, path in enumerate(images.files):
            assert torch.equal(data[i][0], evaluation_tensor(path, SMALL))


@pytest.mark.parametrize(("augmentation", "reads"), [(Augmentation(), 1), (RESIZED, 2)], ids=["random", "resized"])
def test_without_augmentation_images_are_as_evaluated_and_decoded_once(images, augmentation, reads, monkeypatch):
    read = []
    for module in (dataset, preprocessing):
        true = module.load
        monkeypatch.setattr(module, "load", lambda path, true=true, **how: read.append(path) or true(path, **how))
    data = ImageDataset(images, SMALL, augmentation)
    before = data[3][0]
    plain = data.without_augmentation()
    assert torch.equal(plain[3][0], evaluation_tensor(images.files[3], SMALL))
    assert len(read) == reads + 1  # plus one in the line above
    assert torch.equal(data[3][0], before)


def test_training_images_without_augmentation_equal_evaluation(images):
    data = ImageDataset(images, SMALL, Augmentation(flip=False, crop="none"))
    assert torch.equal(data[3][0], evaluation_tensor(images.files[3], SMALL))


def test_a_random_crop_is_a_window_of_the_frame_maybe_mirrored(images):
    frame = evaluation_tensor(images.files[0], SMALL.at(20, 20))
    data, seen = ImageDataset(images, SMALL, Augmentation()), set()
    for epoch in range(200):
        data.set_epoch(epoch)
        crop = data[0][0]
        for top in range(5):
            for left in range(5):
                window = frame[:, top : top + 16, left : left + 16]
                seen |= {(top, left, flip) for flip, x in ((0, window), (1, window.flip(2))) if torch.equal(x, crop)}
    assert len(seen) > 45  # of 5 x 5 positions, flipped or not


def test_flip_can_be_turned_off():
    ramp = np.tile(np.arange(0, 240, 12, dtype=np.uint8), (20, 1))
    data = ImageDataset(Images(ramp[None], (0,)), SMALL, Augmentation(flip=False, crop="random-resized"))
    for epoch in range(20):
        data.set_epoch(epoch)
        assert data[0][0][0, 0, 0] < data[0][0][0, 0, -1]


@pytest.mark.parametrize("budget", [0, 20 * 20 * 3 * 5, 1 << 30])
def test_the_budget_changes_nothing_but_the_cache(images, budget):
    data = ImageDataset(images, SMALL, Augmentation(), cache_bytes=budget)
    assert equal(batches(data), batches(ImageDataset(images, SMALL, Augmentation())))
    assert decoded(data) == min(12, budget // 1200)


def test_small_shared_memory_limits_the_budget(monkeypatch, tmp_path):
    monkeypatch.setattr(dataset.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert cache_room(10**9, str(tmp_path)) == 800
    assert cache_room(10**9, str(tmp_path / "none")) == 10**9


def test_bad_images_are_named(images):
    images.files[4].write_bytes(images.files[4].read_bytes()[:60])
    with pytest.raises(DataError, match=r"04\.png"):
        batches(ImageDataset(images, SMALL))
    with pytest.raises(DataError, match=r"04\.png"):
        batches(ImageDataset(images, SMALL, RESIZED))


def test_items_have_pythons_indices(images):
    data = ImageDataset(images, SMALL)
    assert torch.equal(data[-1][0], data[11][0])
    for index in (12, -13):
        with pytest.raises(IndexError):
            data[index]
    assert data.labels == images.labels
    assert len(data) == 12


def test_one_channel(images):
    data = ImageDataset(images, Preprocessing((16, 16), (0.5,), (0.5,), channels=1), Augmentation())
    assert data[0][0].shape == (1, 16, 16)


def test_pictures_that_are_no_files_are_named_by_number():
    data = ImageDataset(Images([b"no image"], (0,)), SMALL)
    with pytest.raises(DataError, match="image 0 of the data set"):
        data[0]

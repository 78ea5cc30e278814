"""Data for `fit`, `evaluate` and `predict`: folders, splits, data sets of PIL images, loaders."""

import io
import shutil

import numpy as np
import pytest
import torch
from images import COLOURS, NET, furnish, photos
from PIL import Image
from stripes import network, stripes
from tiny import batch, tiny
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomHorizontalFlip
from torchvision.transforms.functional import to_tensor

import bitgraft
from bitgraft import (
    Config,
    DataError,
    DataWarning,
    TrainingError,
    describe,
    evaluate,
    fit,
    identify,
    load_backbone,
    open_data,
    predict,
)

CONFIG = Config(epochs=2, batch=8, size=16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return furnish(tmp_path, monkeypatch) / "photos"


def colours(classes=3):
    torch.manual_seed(0)
    net = bitgraft.Network(load_backbone(NET))
    net.add_task("colours", classes=classes)
    return net


def trained(train, val=None, classes=3, config=CONFIG):
    net = colours(classes)
    fit(net, "colours", train, val, config, progress=False)
    return net


def saved(net, tmp_path):
    net.save_task("colours", tmp_path / "saved.safetensors")
    return (tmp_path / "saved.safetensors").read_bytes()


@pytest.mark.parametrize("chosen", ["default", "decathlon"])
def test_python_and_the_command_line_make_the_same_file(folder, tmp_path, monkeypatch, capsys, chosen):
    from images import bitgraft as command

    photos(folder, test=0)
    shutil.rmtree(folder / "test")
    asked = ("--epochs", "2", "--batch", "8", "--size", "16", "--resize", "18", "--preset", chosen)
    code, _, err = command(capsys, monkeypatch, "train", "photos", "--task", "colours", "--backbone", NET, *asked)
    assert (code, err) == (0, "")
    store = bitgraft.Store("bitgraft-store")
    net = store.network()
    net.add_task("colours", classes=3, preset=chosen)
    fit(net, "colours", "photos", config=CONFIG.changed(resize=18))
    task = bitgraft.compact(net.tasks["colours"])
    filed = store.archive("colours")
    task.metrics = dict(filed.metrics)  # the command measures again after rounding
    task.description = filed.description  # and adds a description of the images
    assert saved(net, tmp_path) == store.path("colours").read_bytes()


def test_a_folder_names_the_classes_and_is_validated_on(folder):
    net = trained(str(folder))
    task = net.tasks["colours"]
    assert task.classes == ("blue", "green", "red")
    assert task.metadata.preprocessing["size"] == [16, 16]
    assert task.metrics["best"]["val_accuracy"] > 0.3


@pytest.mark.filterwarnings("ignore::bitgraft.errors.DataWarning")  # few images are held out
def test_the_seed_of_training_finds_the_held_out_images_again(folder):
    shutil.rmtree(folder / "val")
    config = CONFIG.changed(seed=3, keep="last", label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0))
    net = colours()
    last = fit(net, "colours", folder, None, config, progress=False).history[-1]
    again = evaluate(net, "colours", folder, split="val", seed=3)
    assert again == pytest.approx({"loss": last["val_loss"], "accuracy": last["val_accuracy"]})
    assert again != pytest.approx(evaluate(net, "colours", folder, split="val"))


def test_evaluation_needs_no_training_images(folder):
    net = trained(folder)
    shutil.rmtree(folder / "test")
    with pytest.raises(DataError, match=r'photos has no test images: choose split="train" or split="val"'):
        evaluate(net, "colours", folder)
    expected = evaluate(net, "colours", folder, split="val")
    shutil.rmtree(folder / "train")
    assert evaluate(net, "colours", folder, split="val") == expected
    assert evaluate(net, "colours", folder / "val") == expected


def test_splits_train_as_their_folder_does(folder, tmp_path):
    assert saved(trained(open_data(folder)), tmp_path) == saved(trained(folder), tmp_path)


def test_classes_are_matched_by_name(folder):
    names = ["red", "none", "green", "blue"]
    net = trained(folder, classes=names)
    assert net.tasks["colours"].classes == tuple(names)
    assert evaluate(net, "colours", folder)["accuracy"] > 0.5
    with pytest.raises(DataError, match="does not know 1 of the 3 classes in the data: green"):
        trained(folder, classes=["red", "blue"])


@pytest.mark.parametrize("transform", [None, RandomHorizontalFlip()])
def test_a_data_set_of_pil_images(folder, transform):
    net = trained(ImageFolder(folder / "train", transform), ImageFolder(folder / "val"))
    assert net.tasks["colours"].metadata.preprocessing["size"] == [16, 16]
    assert evaluate(net, "colours", ImageFolder(folder / "test"))["accuracy"] > 0.5


def test_a_data_set_of_pil_images_trains_as_its_folder_does(folder, tmp_path):
    net = trained(ImageFolder(folder / "train"), ImageFolder(folder / "val"), ["blue", "green", "red"])
    assert saved(net, tmp_path) == saved(trained(folder), tmp_path)


def test_a_loader_provides_its_batch_size_and_collate_fn(tmp_path):
    seen = []

    def collate(items):
        seen.append(len(items))
        return torch.utils.data.default_collate(items)

    data, held_out = stripes(48, 1), stripes(9, 2)
    one, other = network(), network()
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate)
    fit(one, "stripes", loader, DataLoader(held_out, batch_size=3), Config(epochs=1))
    fit(other, "stripes", data, held_out, Config(epochs=1, batch=16))
    assert set(seen) == {16, 48}  # 48: one pass over features, four batches at a time
    for net, file in ((one, "one"), (other, "other")):
        net.save_task("stripes", tmp_path / file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_custom_collate_fn_makes_tensors_of_pil_images(folder):
    def collate(items):
        pictures = torch.stack([torch.tensor(np.asarray(image)).movedim(-1, 0) / 255 for image, _ in items])
        return pictures, torch.tensor([label for _, label in items])

    loader = DataLoader(ImageFolder(folder / "train"), batch_size=8, collate_fn=collate)
    net = trained(loader)
    assert "size" not in net.tasks["colours"].metadata.preprocessing  # images come from the user's collate_fn
    assert evaluate(net, "colours", DataLoader(ImageFolder(folder / "test"), collate_fn=collate))["accuracy"] > 0.5


@pytest.mark.parametrize("part", ["", "val"])
def test_a_folder_to_validate_on(folder, tmp_path, part):
    other = trained(folder / "train", folder / part)
    assert saved(other, tmp_path) == saved(trained(folder), tmp_path)


def test_settings_override_the_loaders():
    seen = []

    class Watch(bitgraft.training.callbacks.Callback):
        def begin(self, plan):
            seen.append(plan.steps_per_epoch)

    loader = DataLoader(stripes(48, 1), batch_size=16)
    fit(network(), "stripes", loader, None, Config(epochs=1, batch=24), callbacks=[Watch()])
    assert seen == [2]


@pytest.mark.parametrize(
    "choose",
    [
        lambda data: {"sampler": WeightedRandomSampler([1.0] * 48, 48)},
        lambda data: {"sampler": SubsetRandomSampler(range(9))},
        lambda data: {"sampler": RandomSampler(data, num_samples=9)},
        lambda data: {"sampler": RandomSampler(data, replacement=True)},
        lambda data: {"batch_sampler": [[0, 1], [2, 3]]},
        lambda data: {"batch_size": None},
    ],
)
def test_a_loader_with_a_sampler_of_its_own_is_refused(choose):
    """All images would be used, of which some may be held out."""
    data = stripes(48, 1)
    loader = DataLoader(data, **choose(data))
    for use in (
        lambda: fit(network(), "stripes", loader),
        lambda: fit(network(), "stripes", data, loader),
        lambda: evaluate(network(), "stripes", loader),
    ):
        with pytest.raises(TrainingError, match=r"pass loader\.dataset, or a torch\.utils\.data\.Subset"):
            use()


class WithoutLabels(Dataset):
    """Does not list its labels."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.parametrize("wrap", [lambda data: data, WithoutLabels, DataLoader])
def test_one_class_is_refused(wrap):
    images, _ = stripes(12, 1).tensors
    data = TensorDataset(images, torch.ones(12, dtype=torch.int64))
    with pytest.raises(TrainingError, match="all 12 training images of task 'stripes' are of one class, '1'"):
        fit(network(), "stripes", wrap(data), config=Config(epochs=1))


def test_an_empty_set_is_refused():
    with pytest.raises(TrainingError, match="the training data of task 'stripes' is empty"):
        fit(network(), "stripes", WithoutLabels(stripes(0, 1)), config=Config(epochs=1))


def test_data_without_a_length_is_refused():
    with pytest.raises(TrainingError, match="a generator has no length or no items: give a folder"):
        fit(network(), "stripes", (pair for pair in stripes(6, 1)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(stripes(6, 1))

    def __len__(self):
        return 6


@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader, lambda data: DataLoader(data, collate_fn=tuple)])
def test_a_stream_is_refused(wrap):
    for use in (fit, evaluate):
        with pytest.raises(TrainingError, match="a Stream has no length or no items"):
            use(network(), "stripes", wrap(Stream()))


def test_a_data_set_in_another_order_of_classes_is_refused(folder):
    """Its labels would be taken for the wrong classes."""
    names, data = ["red", "green", "blue"], ImageFolder(folder / "train")
    for given in (data, Subset(data, range(9)), DataLoader(ImageFolder(folder / "train", to_tensor))):
        for use in (fit, evaluate):
            with pytest.raises(DataError, match="numbers its classes blue, green, red, but task 'colours' red, green"):
                use(colours(names), "colours", given)
    trained(ImageFolder(folder / "train", target_transform=lambda label: 2 - label), classes=names)


def test_a_folder_of_one_class_and_one_of_few_images(tmp_path, monkeypatch):
    folder = furnish(tmp_path, monkeypatch) / "photos"
    photos(tmp_path / "one", classes=("red",))
    with pytest.raises(TrainingError, match="are of one class, 'red', so there is nothing to tell apart"):
        trained(tmp_path / "one", classes=1)
    photos(tmp_path / "few", train=2, val=2)
    with pytest.warns(DataWarning, match="3 of 3 classes have fewer than 5 training images"):
        trained(tmp_path / "few")
    assert folder.exists()


def test_training_leaves_the_callers_random_numbers_alone():
    net = network()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    fit(net, "stripes", stripes(12, 1), config=Config(epochs=1))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("progress", [None, False, True])
def test_progress_is_shown_if_asked_for(capsys, progress):
    fit(network(), "stripes", stripes(12, 1), config=Config(epochs=1), progress=progress)
    assert ("epoch 1/1" in capsys.readouterr().out) is (progress is True)


def test_predict_takes_one_image_or_several(folder):
    net = trained(folder)
    file = folder / "test" / "red" / "0.png"
    held = io.BytesIO(file.read_bytes())
    first, *others = answers = predict(net, "colours", file)
    assert first["class"] == "red"
    assert {answer["class"] for answer in others} == {*COLOURS} - {"red"}
    assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
    several = [str(file), held.getvalue(), Image.open(file), np.asarray(Image.open(file))]
    assert predict(net, "colours", several, top=1, batch=1) == [[first]] * 4
    net.train()
    assert predict(net, "colours", file)[0] == first  # without dropout
    assert net.tasks["colours"].training
    assert len(predict(net, "original", file)) == 5
    with pytest.raises(bitgraft.UnknownTaskError):
        predict(net, "flowers", file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_in_another_dtype_takes_the_same_images(folder, dtype):
    net = colours()
    fit(net.to(dtype), "colours", folder, config=CONFIG.changed(statistics="batch"))
    assert evaluate(net, "colours", folder)["accuracy"] > 0.5
    describe(net, "colours", folder)
    file = folder / "test" / "red" / "0.png"
    assert predict(net, "colours", file)[0]["class"] == "red"
    assert identify(net, file)["route"][0]["task"] == "colours"


def test_a_softmax_at_the_end_changes_neither_training_nor_answers():
    picture, found = np.full((8, 8, 3), 200, np.uint8), []
    for end in (nn.Identity(), nn.Softmax(1), nn.LogSoftmax(1)):
        net = bitgraft.Network(nn.Sequential(tiny(), end), head="0.fc", example=(1, 3, 8, 8))
        net.add_task("t", classes=2, preprocessing={"size": [8, 8]})
        images = TensorDataset(batch(16), torch.arange(16) % 2)
        loss = fit(net, "t", images, images, Config(epochs=2, batch=8), progress=False).history[-1]["val_loss"]
        answers = [*predict(net, "t", picture), *predict(net, "original", np.full((224, 224, 3), 200, np.uint8))]
        found.append([loss, *(answer["probability"] for answer in answers)])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)


def test_wrong_arguments_of_fit_are_explained():
    data = stripes(9, 1)
    for config in ({"epochs": 1}, "quick"):
        with pytest.raises(TrainingError, match=r"pass a bitgraft\.Config"):
            fit(network(), "stripes", data, config=config)
    for tasks, train, val in (
        ([], {}, None),
        (["stripes"], data, None),
        (["stripes"], {}, None),
        (["stripes"], {"stripes": data}, data),
    ):
        with pytest.raises(TrainingError, match="pass data as a mapping from their names"):
            fit(network(), tasks, train, val)
    with pytest.raises(TrainingError, match="loss='mse': pass a function"):
        fit(network(), "stripes", data, loss="mse")
